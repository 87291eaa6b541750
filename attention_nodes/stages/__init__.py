"""A stage of an attention node: some of its layers, in a process of their own (topspin.stages)."""
