"""M2N, and the overlap of its two sides."""
