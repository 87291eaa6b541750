"""Speculative decoding: servers without it, forced and adaptive."""
