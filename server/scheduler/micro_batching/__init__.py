"""Splits a step into micro-batches by predicted time: the costs, their fit, the split."""
