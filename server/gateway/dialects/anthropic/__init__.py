"""Anthropic's API of chats."""
