"""Attention to retrieved keys: quality, tasks, speed."""
