"""Routing to the top-k experts, and the grouping of (token, expert) pairs by expert."""
