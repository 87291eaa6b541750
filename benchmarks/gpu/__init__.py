"""What `make gpu` runs: smoke (is it right?), rooflines (kernels), decode (a whole model)."""
