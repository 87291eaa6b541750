"""Families whose parts need tests of their own."""
