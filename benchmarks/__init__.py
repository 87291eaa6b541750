"""Benchmarks: one script per question; each prints a table and writes JSON to results/."""
