"""The services' configuration. See docs/configuration.md."""
