"""Grammars on the wire: their names, and the limits within which they are compiled.

A grammar is llguidance's text. Gateways validate it and attention nodes compile it, both within
`limits`, so that what the first accept the second can follow. Imports llguidance where it is used:
machines with GPUs that run kernels only need not have it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES: Final = 256 * 1024
MAX_REASON_CHARS: Final = 400

COMPILE_CPU_S: Final = 5.0
"""CPU time of compiling a grammar."""
MAX_COMPILED_BYTES: Final = 256 * 1024 * 1024
"""Memory of one grammar, compiled and followed."""
MAX_ALL_COMPILED_BYTES: Final = 2 * 1024**3
"""Memory of all grammars that a node compiles, follows and keeps; the largest is given up."""


def grammar_key(grammar: str) -> str:
    """Return the name of a grammar in messages and caches."""
    return hashlib.sha256(grammar.encode()).hexdigest()


def limits() -> LLParserLimits:
    """Return the limits of compiling and of each step.

    By llguidance's account 50,000 units of initial fuel take a millisecond, and so do 14,000 of a
    step's, and 20,000 items; a lexer's state has 1 to 2 kB. A row has an item for each choice and
    more for each tool; all rows of a text are kept.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_items_in_row=10_000,
        max_lexer_states=50_000,
        max_grammar_size=250_000,
        verbose_errors=False,
    )


def reason_of(error: str) -> str:
    """Return llguidance's message as one short line."""
    line = " ".join(error.split())
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."
