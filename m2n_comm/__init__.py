"""The data plane between attention and expert nodes: M attention to N expert nodes.

Owns the rules and the handshake, and in subpackages the transports: `host` (local, shm, tcp),
`nixl`, and `gpu` (within a device, between GPUs, or through pinned memory). Knows no model, no
request and no scheduler; nodes open nets with m2n_comm.open and use them by m2n_comm.net.
"""
