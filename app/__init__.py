"""The roof: the command line, and the launch of an engine's processes."""
