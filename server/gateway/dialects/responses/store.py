"""The responses that /v1/responses keeps, for clients that continue or read them.

Owns a bounded store in this gateway's memory, oldest out first: it is not shared by several
gateways and does not survive a restart. Knows no HTTP.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple

from msgspec import Raw

from server.gateway.dialects.chat.request import ChatMessage, ToolCall
from server.gateway.errors import truncated
from server.gateway.parsing.json_scan import is_object
from server.gateway.parsing.message import AnswerMessage
from topspin.errors import InvalidRequest, NotFound

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20


class StoredResponse(NamedTuple):
    """A response: the body of its answer, and the conversation up to and with its output.

    `items` are the request's input, `num_bytes` estimates the memory of all. A response that is not
    whole has no conversation yet, and `cancel` as long as it grows.
    """

    body: bytes
    messages: tuple[ChatMessage, ...]
    num_bytes: int
    items: tuple[Raw, ...] = ()
    cancel: Callable[[], None] | None = None


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
            if (before := self._stored.pop(response_id, None)) is not None:
                self._num_bytes -= before.num_bytes
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
        items: tuple[Raw, ...],
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
        self.add(response_id, StoredResponse(body, (*messages, answer), size, items))

    def hold(
        self,
        response_id: str,
        body: bytes,
        cancel: Callable[[], None] | None,
        *,
        items: tuple[Raw, ...],
        num_bytes: int,
    ) -> None:
        """Keep a response that is not whole; `cancel` ends it, None: it has ended."""
        size = num_bytes + 2 * len(body)
        self.add(response_id, StoredResponse(body, (), size, items, cancel))

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

    def conversation(self, response_id: str, *, param: str) -> StoredResponse:
        """Return a response that another follows on; raises NotFound, or InvalidRequest."""
        stored = self.get(response_id, param=param)
        if not stored.messages:
            raise InvalidRequest(
                f"`{param}`: the response `{truncated(response_id, 64)}` is not complete",
                param=param,
            )
        return stored

    def remove(self, response_id: str) -> None:
        """Forget a response, and end it; raises NotFound."""
        if (cancel := self.get(response_id).cancel) is not None:
            cancel()
        with self._lock:
            self._num_bytes -= self.get(response_id).num_bytes
            del self._stored[response_id]
