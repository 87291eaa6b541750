"""Compiled codebooks, the search for keys, and attention to what is selected."""
