"""Tokens of a step: drafts, constraints, sampling and scores."""
