"""Strangers' grammars, each compiled and followed in a process that may die.

`processes` is the node's side, `fork_server` has the vocabulary and forks a process per grammar,
`grammar_process` is that process, `frames` are the messages between the three. Only `processes` is
imported by a node: the others are modules of processes without torch.
"""
