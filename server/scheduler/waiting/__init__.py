"""The requests that wait for a node: who may, whose turn it is, and how long that takes."""
