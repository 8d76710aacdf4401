"""Runs inference on CPUs by compiled kernels: attention, decoder blocks, and whole forwards as one program."""
