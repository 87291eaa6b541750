"""Checkpoints: configuration, tensors per role, tokenizer and chat template.

Owns everything that is read from a checkpoint directory, and the making of the default
model. Knows no node, no wire and no kernel; attention nodes, expert nodes, the server
and the planner call it. `config`, `families`, `rope`, `tokenizer`,
`chat_template` and `hub` import no torch, so that the server may use them.
"""
