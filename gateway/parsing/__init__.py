"""Splits a model's output into reasoning, words (plain text) and function calls while it arrives."""
