"""Starts an engine: processes, supervision, calibration of the layout, all roles in one process.

The composition root: it may import every role, no role imports it.
"""
