"""Plans, measures and quantises a deployment: the planner, device profiles, checkpoints."""
