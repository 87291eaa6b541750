"""The CPU's kernels against the machine's limits."""
