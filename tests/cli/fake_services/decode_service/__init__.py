"""Stands in for the decode service in tests of the command line."""
