"""The planner: a cost model, a search over plans, and what it says of them."""
