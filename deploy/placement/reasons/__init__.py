"""The reasons of a plan: what binds it, and the smallest changes that would do."""
