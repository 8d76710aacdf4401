"""Streams and events: one interface (`stream.py`), implemented for CUDA, CPU threads and tests. See docs/streams.md."""
