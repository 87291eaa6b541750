"""The CPU's kernels: `ops` implements `kernels.contracts.Ops` with them.

`compiled/` holds the kernels that numba compiles, `simd/` the vector operations that they use.
Knows no node and no transport.
"""
