"""Stands in for the prefill service in tests of the command line."""
