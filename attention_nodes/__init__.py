"""The attention worker: one data-parallel runner of everything but the routed experts.

Owns QKV/O weights, norms, router, embeddings, LM head, shared experts, dense MLPs, its
paged KV cache, and sampling. Never loads a routed expert's weights, knows no request and
no text: it executes StepPlans. Order of reading: worker.py, rally.py, decoder.py.
"""
