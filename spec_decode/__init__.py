"""Speculative decoding without a device and without a clock: drafts, drafters, acceptance."""
