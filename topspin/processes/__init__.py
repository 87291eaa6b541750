"""Processes of an engine: connections with keys, a node's life, and its progress."""
