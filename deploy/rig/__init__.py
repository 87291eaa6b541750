"""Nodes without a scheduler: one attention and one expert node, for measurements."""
