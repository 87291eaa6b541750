"""Kernels that numba compiles once and keeps in the user's cache, one file per group of ops.

Called by `kernels.cpu` with plain addresses and sizes; knows no tensor.
"""
