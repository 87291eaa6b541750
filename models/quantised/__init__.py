"""Checkpoints whose weights are stored in 8 or 4 bits: their configurations, and their reading."""
