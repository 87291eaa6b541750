"""Vector operations for code that numba compiles: types, arithmetic, inner loops.

Used inside the functions of `kernels.cpu.compiled` only.
"""
