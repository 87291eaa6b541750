"""One step of an attention node: its inputs, its layers, its keys and its results."""
