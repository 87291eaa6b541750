"""Sampling on the device, with the draws of `kernels.sampling`."""
