"""Stages, unequal, optional and slow nodes, and local layers through whole engines."""
