"""Frames of the host: headers, windows in memory, and the compiled code that writes and reads them.

Knows no order of frames; the two sides of M2N and the transports use it.
"""
