"""The policy and its parts: queue, prefix cache, batches, plans, results.

Pure: no socket, no clock, no tensor. service.py carries the plans out.
"""
