"""A model's text as a message: its reasoning, its content and its calls of tools."""
