"""The rules that a plan must keep to: checks, the table of combinations, the facts of a model."""
