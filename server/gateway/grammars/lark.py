"""Parts of grammars in llguidance's Lark: texts, and markers that may be special tokens. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable

# Gives the Lark of a marker.
Terminal = Callable[[str], str]


def quoted(text: str) -> str:
    """Return the Lark of `text`; it is not to be empty."""
    return json.dumps(text, ensure_ascii=False)


def marker_terminal(token_id: Callable[[str], int | None], special: frozenset[int]) -> Terminal:
    """Return the Lark of markers for a tokenizer: special tokens have no text in a grammar."""

    def terminal(marker: str) -> str:
        found = token_id(marker)
        return f"<[{found}]>" if found in special else quoted(marker)

    return terminal
