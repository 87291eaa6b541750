"""Measures a device: the times of one layer that the planner computes with."""
