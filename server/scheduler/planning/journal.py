"""Entries for the logs on what happens to single requests in the engine.

Owns the entries' names and fields. Knows no logging: the policy calls the `Note` it was given,
server.scheduler.command makes one that logs.
"""

from __future__ import annotations

from typing import Protocol

from server.scheduler.planning.sequence import Request
from topspin.errors import TopspinError
from topspin.messages import FinishReason


class JournalNote(Protocol):
    """Takes an entry about a choice of a client's request; `is_bad`: an operator should see it."""

    def __call__(
        self, what: str, request_id: str, fields: dict[str, object], *, is_bad: bool = False
    ) -> None:
        """Take the entry; `request_id` is the engine's."""


def no_note(what: str, request_id: str, fields: dict[str, object], *, is_bad: bool = False) -> None:
    """Take an entry and drop it."""


class Journal:
    """Turns events of the policy into entries."""

    def __init__(self, note: JournalNote) -> None:
        self._note = note

    def admitted(self, request: Request, *, node: int, num_cached: int) -> None:
        """Record that `request` got its place on an attention node; again after each preemption."""
        fields: dict[str, object] = {
            "node": node,
            "prompt_tokens": request.num_prompt_tokens,
            "cached_tokens": num_cached,
            "queue_s": round(request.queue_s, 6),
        }
        self._note("admitted", request.request_id, fields)

    def finished(self, request: Request, reason: FinishReason) -> None:
        """Record that `request` is complete."""
        self._note("finished", request.request_id, {"reason": reason, **_counts(request)})

    def aborted(self, request: Request) -> None:
        """Record that the gateway gave `request` up: the client has gone, or has all it wants."""
        self._note("aborted", request.request_id, _counts(request))

    def preempted(self, request: Request) -> None:
        """Record that `request` lost its blocks and waits again."""
        self._note("preempted", request.request_id, _counts(request))

    def replayed(self, request: Request) -> None:
        """Record that `request` waits to be computed again after a loss."""
        fields = {"replays": request.num_replays, **_counts(request)}
        self._note("replayed", request.request_id, fields)

    def failed(self, request: Request, error: TopspinError) -> None:
        """Record that `request` ended with `error`."""
        fields = {"code": error.code, "error": str(error), **_counts(request)}
        self._note("failed", request.request_id, fields, is_bad=True)


def _counts(request: Request) -> dict[str, object]:
    return {"output_tokens": request.num_output_tokens}
