"""A fake decode service for tests of the command line."""
