"""A fake prefill service for tests of the command line."""
