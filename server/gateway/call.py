"""The choices of one HTTP request while the engine works on them.

Owns the outputs that have arrived and have not been read, their limit, and the end: by the last
choice, by an error, or because the client has gone. Knows no connection and no text; made by
engine_client.py, read by server.gateway.generation.run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from topspin.messages import RequestOutput

# Output tokens and their log-probabilities that a client has not read, of all choices of a request:
# 16 MB. A client that reads a little from time to time passes every deadline.
MAX_UNREAD = 65536

_log = logging.getLogger("gateway")


class ClientGone(Exception):
    """The HTTP client closed its connection; no answer can be sent."""


class Call:
    """The choices of one HTTP request while the engine works on them.

    Ends once: when all choices have finished, by `cancel`, or by an error, which `next`
    raises after it has returned all earlier outputs. `request_ids` are the choices', in order.
    """

    def __init__(
        self,
        close: Callable[[Call], None],
        abort: Callable[[str], None],
        *,
        grammar_field: str = "",
    ) -> None:
        """`grammar_field` is the client's field that asks for the grammar, if one does."""
        self.grammar_field = grammar_field
        self._close = close
        self._abort = abort
        self._arrived: list[RequestOutput] = []
        self._num_unread = 0
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._queued: set[str] = set()
        self.request_ids: list[str] = []

    async def queued(self) -> None:
        """Wait until the scheduler has queued all choices; raises the error that ended the call."""
        while True:
            if self._error is not None and not self._arrived:
                raise self._error
            if len(self._queued) == len(self.request_ids):
                return
            self._wake.clear()
            await self._wake.wait()

    async def next(self) -> list[RequestOutput]:
        """Wait for outputs and return all that have come; raises the error that ended the call."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        arrived, self._arrived, self._num_unread = self._arrived, [], 0
        return arrived

    def deliver(self, output: RequestOutput) -> None:
        """Hand over an output (called by the reader); ends the call if too many wait."""
        self._queued.add(output.request_id)
        self._arrived.append(output)
        self._wake.set()
        # Log-probabilities of prompts have a limit of their own; many may come at once.
        self._num_unread += len(output.token_ids)
        self._num_unread += sum(len(each.top_ids) for each in output.logprobs)
        if self._num_unread > MAX_UNREAD:
            _log.warning("gateway: a client reads too slowly; its request ends")
            self._arrived = []
            self.cancel()

    def note_queued(self, request_id: str) -> None:
        """Note that a choice is in the scheduler's queue, or was in that of one that is gone."""
        self._queued.add(request_id)
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """End the call with `error` and free its choices; only the first error is kept."""
        if self._error is None:
            self._error = error
            self._wake.set()
        self._close(self)

    def stop(self, request_id: str) -> None:
        """Abort one choice in the engine, e.g. because a stop string was found."""
        self._abort(request_id)

    def cancel(self) -> None:
        """End the call because the client has gone; a finished call is left as it is."""
        self.fail(ClientGone())
