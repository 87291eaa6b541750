"""Drafts and grammars through whole engines."""
