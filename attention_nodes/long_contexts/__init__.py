"""Retrieval of keys by codes, and keys outside the cache."""
