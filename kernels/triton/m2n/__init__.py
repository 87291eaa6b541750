"""The attention and the expert side of M2N between GPUs: put, wait, gather, answer."""
