"""Strangers' grammars, each compiled and followed in a process that may die.

`processes` and `forking` are the node's side; `fork_server` has the vocabulary and forks a process
per grammar, and `grammar_process` is that process: both run without torch. `frames` are the
messages between the three.
"""
