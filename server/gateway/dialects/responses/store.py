"""The responses that /v1/responses keeps, for clients that continue or read them.

Owns a bounded store in this gateway's memory, oldest out first: it is not shared by several
gateways and does not survive a restart. Knows no HTTP.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from server.gateway.dialects.chat.request import ChatMessage, ToolCall
from server.gateway.errors import truncated
from server.gateway.parsing.json_scan import is_object
from server.gateway.parsing.message import AnswerMessage
from topspin.errors import NotFound

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20


class StoredResponse(NamedTuple):
    """A response: the body of its answer, and the conversation up to and with its output.

    `num_bytes` estimates the memory of both.
    """

    body: bytes
    messages: tuple[ChatMessage, ...]
    num_bytes: int


class ResponseStore:
    """The latest responses by id; large requests and answers use it from threads."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = Lock()
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def add(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a response; the oldest ones go if there are too many."""
        with self._lock:
            self._stored[response_id] = stored
            self._num_bytes += stored.num_bytes
            while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
                _, oldest = self._stored.popitem(last=False)
                self._num_bytes -= oldest.num_bytes

    def keep(
        self,
        response_id: str,
        body: bytes,
        message: AnswerMessage,
        *,
        messages: Sequence[ChatMessage],
        num_bytes: int,
    ) -> None:
        """Keep a response: its body, and after the conversation `messages` its own `message`.

        `num_bytes` is the size of that conversation: an entry counts all that it keeps alive. A
        call that was cut is left out, since no template could show its arguments.
        """
        calls = [
            ToolCall.of(call.id, call.name, call.arguments)
            for call in message.calls
            if is_object(call.arguments)
        ]
        contents = [message.content] if message.content else []
        answer = ChatMessage.of_assistant(contents, thoughts=[message.reasoning], calls=calls)
        size = num_bytes + 2 * len(body)
        self.add(response_id, StoredResponse(body, (*messages, answer), size))

    def get(self, response_id: str, *, param: str | None = None) -> StoredResponse:
        """Return a response; raises NotFound."""
        stored = self._stored.get(response_id)
        if stored is None:
            raise NotFound(
                f"the response `{truncated(response_id, 64)}` is not (or no longer) stored by "
                "this gateway",
                param=param,
            )
        return stored

    def remove(self, response_id: str) -> None:
        """Forget a response; raises NotFound."""
        with self._lock:
            self._num_bytes -= self.get(response_id).num_bytes
            del self._stored[response_id]
