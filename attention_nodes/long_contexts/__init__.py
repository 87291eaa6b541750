"""Retrieval of keys by codes, keys outside the cache, and what a node does for both in a step."""
