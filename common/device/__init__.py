"""Streams and events: one contract (`stream.py`), run by CUDA, by CPU threads and by a script. See docs/streams.md."""
