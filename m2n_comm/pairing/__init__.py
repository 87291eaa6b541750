"""Two nodes become a pair: addresses, identities, the handshake, and keys.

Knows no frame and no transport; m2n_comm.open forms the pairs of each transport with it.
"""
