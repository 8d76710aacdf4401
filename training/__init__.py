"""Trains an EAGLE-3 draft head for a target model."""
