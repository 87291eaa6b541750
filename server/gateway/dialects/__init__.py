"""The HTTP APIs that the gateway speaks, a room each: the request and its reply together."""
