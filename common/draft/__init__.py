"""Draft heads for speculative decoding: EAGLE, EAGLE-3 and multi-token prediction, loaded from their checkpoints."""
