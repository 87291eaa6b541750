"""HTTP: the listening socket, the protocol's deadlines, and the checks of a body.

Knows no route and no engine; server.gateway.service and server.gateway.handler use it.
"""
