"""Compiled attention of single rows."""
