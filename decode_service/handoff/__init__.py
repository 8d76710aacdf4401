"""The decode service's side of the handoff."""
