"""Servers that benchmarks start for a turn and stop after it."""
