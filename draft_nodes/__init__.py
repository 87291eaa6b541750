"""The draft model: a small model that guesses what the attention nodes' model says next.

Owns the draft model's weights, experts included, and its KV cache; which tokens it computes is
spec_decode's. It has the attention nodes' decoder and cache. So far it runs inside the process of
an attention node, between two steps; nothing here depends on that but beside_attention.py.
Order of reading: model.py, kv_layout.py, drafter.py.
"""
