"""Draft heads: EAGLE, EAGLE-3 and multi-layer, from the checkpoint formats they come in."""
