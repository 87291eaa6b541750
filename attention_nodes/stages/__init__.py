"""A stage of an attention node: some of its layers, in a process (topspin.plan.stages)."""
