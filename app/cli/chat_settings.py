"""The sampling parameters that `topspin chat` can set, by flags and by /set.

Owns their names and types; the server checks their values. Apart from app.cli.chat so that
the command line's help needs no HTTP client.
"""

from __future__ import annotations

from collections.abc import Mapping

SETTINGS: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "seed": int,
}
