"""Tokens of a step: constraints, sampling and scores."""
