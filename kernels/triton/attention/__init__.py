"""Paged attention of prompts, decode rows and token trees."""
