"""Asks a draft node for the drafts of an attention node's steps.

Owns the connection to it, and its end: a draft node that is gone, late or wrong costs drafts, never
tokens and never more than a step's time. What is asked, and what of the answers counts, is
spec_decode.asking's. Belongs to the attention node's one busy thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from spec_decode.asking import Patience, Questions
from spec_decode.draft import NO_DRAFT, Draft, DraftRequest, DraftText
from topspin.errors import PeerLost, ProtocolError
from topspin.messages import TreeOffers
from topspin.processes.channel import ControlClient

RETRY_S = 1.0
"""The pause before a lost connection is opened again."""

_log = logging.getLogger("attention")


class AskingDrafter:
    """Drafts by the draft node at an address; satisfies spec_decode.draft.Drafter.

    `vocab_size` is that of the attention node's model. `num_losses` counts the connections that
    have ended.
    """

    def __init__(
        self,
        address: str,
        vocab_size: int,
        *,
        connect: Callable[[str], ControlClient] = ControlClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._vocab_size = vocab_size
        self._connect = connect
        self._clock = clock
        self._patience = Patience()
        self._lost_s = 0.0
        self.num_losses = 0
        self._open()

    def _open(self) -> None:
        """Connect, in the background: libzmq waits for a node that is not there yet."""
        self._client: ControlClient | None = self._connect(self._address)
        self._questions = Questions(self._vocab_size)

    def draft(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        now_s = self._clock()
        if self._client is None and now_s - self._lost_s >= RETRY_S:
            self._open()
        client = self._client
        if client is None:
            return [NO_DRAFT] * len(requests)
        try:
            return self._ask(client, requests, now_s)
        except (PeerLost, ProtocolError) as error:
            _log.warning("the draft node is lost, decoding goes on without drafts: %s", error)
            self._client, self._lost_s = None, now_s
            self.num_losses += 1
            client.close()
            return [NO_DRAFT] * len(requests)

    def _ask(
        self, client: ControlClient, requests: Sequence[DraftRequest], now_s: float
    ) -> Sequence[Draft]:
        questions, patience = self._questions, self._patience
        if not questions.is_answered and self._take(client, 0.0):
            patience.answered_late()
        step_s = patience.step_s(now_s)
        if not questions.may_ask:
            return [NO_DRAFT] * len(requests)
        client.send(questions.ask(requests, step_s=step_s))
        deadline_s = now_s + patience.wait_s
        while not (was_answered := self._take(client, deadline_s - self._clock())):
            if self._clock() >= deadline_s:
                break
        patience.done(self._clock(), was_answered=was_answered)
        return questions.drafts(requests)

    def _take(self, client: ControlClient, timeout_s: float) -> bool:
        """Take in the answers that come within `timeout_s`, until the one to the last question."""
        message = client.recv(max(0.0, timeout_s))
        while message is not None:
            if not isinstance(message, TreeOffers):
                raise ProtocolError(f"a draft node sent {type(message).__name__}")
            if self._questions.take(message):
                return True
            message = client.recv(0.0)
        return False

    def end(self, text: DraftText) -> None:
        self._questions.end(text.seq_id)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
