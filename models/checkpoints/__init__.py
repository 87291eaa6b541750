"""A checkpoint's tensors: their index, their readers and a fingerprint of them."""
