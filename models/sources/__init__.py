"""Checkpoints' places: directories, a hub, a package, and made ones."""
