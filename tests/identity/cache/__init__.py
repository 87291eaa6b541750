"""Retrieval, spill and fp8 keys through whole engines."""
