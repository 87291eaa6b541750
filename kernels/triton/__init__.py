"""The GPU's kernels, written in Triton: `ops` implements `kernels.contracts.Ops` with them.

In each package `launches` checks and launches, `kernels` has the compiled functions.
"""
