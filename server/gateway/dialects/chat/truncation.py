"""Conversations that are too long, answered by their latest turns (`truncation: auto`). Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from server.gateway.dialects.chat.prompt import ChatPrompt
from server.gateway.dialects.chat.request import ChatMessage
from server.gateway.errors import ContextLengthExceeded


def latest_turns(
    messages: Sequence[ChatMessage],
    prompt_of: Callable[[Sequence[ChatMessage]], ChatPrompt],
    *,
    room: int,
) -> ChatPrompt:
    """Return the prompt of as many of the latest turns as have at most `room` tokens.

    A turn begins with a user's message; the system's messages before the first one stay. Of turns
    that are all too long the last one is kept, whose length is then refused. A longer conversation
    has more tokens, so that the turns are found by halving.
    """
    head = next((idx for idx, each in enumerate(messages) if each.role == "user"), len(messages))
    while head and messages[head - 1].role not in ("system", "developer"):
        head -= 1
    begins = [idx for idx, each in enumerate(messages) if idx >= head and each.role == "user"]
    begins = sorted({head, *begins}) if head < len(messages) else [head]

    def fits(begin: int) -> bool:
        try:
            return len(prompt_of([*messages[:head], *messages[begin:]]).ids) <= room
        except ContextLengthExceeded:
            return False

    found = bisect_left(begins[:-1], True, key=fits)
    return prompt_of([*messages[:head], *messages[begins[found] :]])
