"""The place in a chat's prompt where it stops being one that was computed before.

Owns the report that `report_prefix_cache` asks for: agents' authors find with it the message by
which a request differs from the one before. Pure; server.gateway.dialects.chat.prompt finds where
the messages are in the prompt's text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

SHOWN_CHARS = 80


class PrefixCacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """The first message that was not wholly found in the cache, and the text from there on.

    `message` is its index; null if it comes before the first one (tools, the template's own text).
    What is cached ends at a block's end, so that up to a block of `text` may be as before.
    """

    cached_tokens: int
    prompt_tokens: int
    message: int | None
    role: str | None
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptMap:
    """A prompt's text, and where its messages begin: (character, index, role), ascending."""

    text: str
    begins: Sequence[tuple[int, int, str]]

    def report(self, *, num_cached: int, num_tokens: int, cached_text: str) -> PrefixCacheReport:
        """Return the report for a prompt whose first `num_cached` tokens are `cached_text`."""
        place = len(cached_text)
        found = bisect_right([begin for begin, _, _ in self.begins], place) - 1
        _, index, role = self.begins[found] if found >= 0 else (0, None, None)
        return PrefixCacheReport(
            cached_tokens=num_cached,
            prompt_tokens=num_tokens,
            message=index,
            role=role,
            text=self.text[place : place + SHOWN_CHARS],
        )
