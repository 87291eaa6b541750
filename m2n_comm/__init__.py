"""The data plane between attention and expert nodes: M attention to N expert nodes.

Owns frames, windows, flags and the transports (local, shm, tcp). Knows no model, no
request and no scheduler; attention and expert nodes call it through m2n_comm.net.
"""
