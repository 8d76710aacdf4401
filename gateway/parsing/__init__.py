"""Takes a model's output apart while it arrives: reasoning, words, and calls of functions."""
