"""The engine's draft nodes: who has joined, their start, their counters, their end.

Owns their list. A draft node takes no part in steps: once the engine serves, one that is lost is
only missed, and one that comes (back) gets its Welcome at once. Knows no drafts: those go directly
between attention and draft nodes. Called by service.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from server.scheduler.nodes.roster import Member
from topspin.errors import ConfigError, NodeLost, ProtocolError, TopspinError, VersionMismatch
from topspin.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    DraftCounts,
    Goodbye,
    Hello,
    NodeMemory,
    Ready,
)


@dataclass(slots=True)
class _JoinedDraft:
    peer: bytes
    pid: int
    is_ready: bool = False


class DraftSide:
    """The list of the engine's draft nodes."""

    def __init__(
        self,
        indices: Iterable[int],
        *,
        revision: str,
        report_dead: Callable[[int], None],
        log: logging.LoggerAdapter[logging.Logger],
    ) -> None:
        """`report_dead` gets the process id of each node that is lost.

        Until `may_be_lost` is set the loss of a node ends the start of the engine.
        """
        self.may_be_lost = False
        self._report_dead = report_dead
        self._log = log
        self._indices = tuple(indices)
        self._revision = revision
        self._nodes: dict[int, _JoinedDraft] = {}
        self._index_of: dict[bytes, int] = {}
        self._counts: dict[int, DraftCounts] = {}
        self._past: list[DraftCounts] = []
        self.memory: dict[Member, NodeMemory] = {}
        """The last report of each node."""

    @property
    def is_ready(self) -> bool:
        """Say whether every draft node is ready."""
        return not self.awaited()

    def awaited(self) -> str:
        """Return a text that names the draft nodes that are not ready."""
        late = [each for each in self._indices if not self._is_ready(each)]
        return ", ".join(f"draft {index}" for index in late)

    def _is_ready(self, index: int) -> bool:
        return index in self._nodes and self._nodes[index].is_ready

    def join(self, peer: bytes, hello: Hello) -> None:
        """Add a node; raises VersionMismatch or ConfigError with the reason to send in Refused."""
        name = f"draft {hello.index}"
        if (hello.protocol, hello.revision) != (PROTOCOL_VERSION, self._revision):
            raise VersionMismatch(
                f"{name} speaks protocol {hello.protocol} of revision {hello.revision!r}, this "
                f"engine {PROTOCOL_VERSION} of {self._revision!r}"
            )
        if hello.index not in self._indices:
            raise ConfigError(f"{name} has no place: the engine has {len(self._indices)} of them")
        if hello.index in self._nodes:
            raise ConfigError(f"{name} is there already; each place is taken once")
        self._nodes[hello.index] = _JoinedDraft(peer, hello.pid)
        self._index_of[peer] = hello.index

    def index(self, peer: bytes) -> int | None:
        """Return the index of the node `peer`, None if it is none."""
        return self._index_of.get(peer)

    def lose(self, peer: bytes, reason: str) -> None:
        """Go on without a node, whose counts are kept; raises NodeLost if that cannot be."""
        index = self._index_of.pop(peer)
        self._report_dead(self._nodes.pop(index).pid)
        if index in self._counts:
            self._past.append(self._counts.pop(index))
        error = NodeLost(f"lost draft {index}: {reason}")
        if not self.may_be_lost:
            raise error
        self._log.warning("%s; decoding goes on without its drafts", error)

    def heard(self, peer: bytes, message: AnyMessage) -> bool:
        """Take a message in; returns whether a node has become ready by it.

        A node that says Goodbye, or what no draft node says, is lost: raises as lose(), or
        ConfigError if the engine cannot start as configured.
        """
        try:
            return self._heard(peer, message)
        except TopspinError as error:
            if isinstance(error, ConfigError) and not self.may_be_lost:
                raise
            self.lose(peer, str(error))
            return False

    def _heard(self, peer: bytes, message: AnyMessage) -> bool:
        index = self._index_of[peer]
        if isinstance(message, Ready):
            self._nodes[index].is_ready = True
            self._log.info("draft %d ready", index)
            return True
        if isinstance(message, DraftCounts):
            self._counts[index] = message
        elif isinstance(message, NodeMemory) and (message.role, message.index) == ("draft", index):
            self.memory[Member("draft", index)] = message
        elif isinstance(message, Goodbye):
            reason = f"draft {index} left: {message.message} ({message.code})"
            raise ConfigError(reason) if message.code == ConfigError.code else NodeLost(reason)
        else:
            raise ProtocolError(f"draft {index} sent {type(message).__name__}")
        return False

    @property
    def counts(self) -> list[DraftCounts]:
        """Return the counters of all lives of all nodes."""
        return [*self._past, *self._counts.values()]

    @property
    def places(self) -> list[Member]:
        """Return every place that the engine has for draft nodes."""
        return [Member("draft", index) for index in self._indices]

    @property
    def members(self) -> dict[Member, bytes]:
        """Return the nodes that are there, and their connections."""
        return {Member("draft", index): node.peer for index, node in self._nodes.items()}
