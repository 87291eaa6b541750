"""HTTP itself: the listening socket, the protocol's deadlines, and what a body must be.

Knows no route and no engine; server.gateway.service and server.gateway.handler use it.
"""
