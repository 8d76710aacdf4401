"""Baton as an application of Ray Serve. docs/ray.md explains it."""
