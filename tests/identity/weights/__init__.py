"""Quantised weights and expert tables through whole engines."""
