"""The CPU's kernels: `ops` implements `kernels.contracts.Ops` with them.

`compiled/` holds what numba compiles, `simd/` the vector operations that compiled kernels are
written with. Knows no node and no transport.
"""
