"""Topspin: contracts that all parts share, and the command line that composes them.

The contracts (errors, config, messages, expert_table, channel, process) import none of
the other folders; cli and launch stand above all of them. See docs/architecture.md.
"""

__version__ = "0.1.0"
