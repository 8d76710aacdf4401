"""Bucket bounds of the histograms, in the unit that the name ends with."""

from __future__ import annotations

PHASE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
BATCH_SIZE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
