"""Tensor parallelism: one model, cut into parts that several processes (ranks) compute together."""
