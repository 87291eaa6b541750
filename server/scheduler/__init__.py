"""The scheduler: queue, admission, block pools, prefix cache, step plans and roster.

policy.py and its imports are pure: no socket, no clock, no tensor. service.py is the only
file that touches the control channel.
"""
