"""The GPU's kernels, written in Triton: `ops` implements `kernels.contracts.Ops` with them.

In each room `launches` checks and launches, `kernels` holds the compiled functions.
"""
