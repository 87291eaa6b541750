"""A whole engine: start-up, layouts, and the predictions of the planner."""
