"""Generated from proto/baton/v1 by `make stubs`; see scripts/stubs.py."""
