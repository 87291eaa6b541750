"""One step of an attention node: its inputs, its drafts, its layers, its keys and its results."""
