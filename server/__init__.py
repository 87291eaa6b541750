"""The server: the HTTP gateway and the scheduler.

Imports neither torch nor a node; nodes are reached over the control channel only.
"""
