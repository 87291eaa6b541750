"""The parts of `make gpu`: smoke (correctness), rooflines (kernels), decode (a whole model)."""
