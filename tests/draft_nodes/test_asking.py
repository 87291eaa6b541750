"""The connection to a draft node: answers, silence, an end, and nonsense, on a real socket."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from draft_nodes.asking import RETRY_S, AskingDrafter
from spec_decode.asking import FIRST_WAIT_S, MAX_UNANSWERED
from spec_decode.draft import NO_DRAFT, Draft, DraftRequest, DraftText
from topspin.messages import Message, Stop, TreeOffer, TreeOffers, Verdicts, pack_ints
from topspin.processes.channel import ControlServer, Received

TIMEOUT_S = 30.0
VOCAB = 16


class Clock:
    """Time passes when the test says so; each look takes a little."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += FIRST_WAIT_S / 4
        return self.now_s


class Node:
    """A draft node that answers what the test says."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.server = ControlServer(address)
        self.peer = b""
        self._heard: deque[Verdicts] = deque()

    def verdicts(self) -> Verdicts:
        while not self._heard:
            self.listen(TIMEOUT_S)
        return self._heard.popleft()

    def listen(self, timeout_s: float) -> int:
        """Take in what comes; returns how many messages are waiting."""
        for event in self.server.poll(timeout_s):
            if isinstance(event, Received):
                assert isinstance(event.message, Verdicts)
                self.peer = event.peer
                self._heard.append(event.message)
        return len(self._heard)

    def send(self, message: Message) -> None:
        assert self.server.send(self.peer, message)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node(f"ipc://@topspin-test-{secrets.token_hex(8)}")
    yield made
    made.server.close()


def request(tokens: Sequence[int], at_most: int = 3) -> DraftRequest:
    return DraftRequest(DraftText(7, np.array(tokens, dtype=np.int32), num_prompt=1), at_most)


def offers(epoch: int, root: int, tokens: Sequence[int]) -> TreeOffers:
    parents = pack_ints(range(-1, len(tokens) - 1))
    logps = (0.0,) * len(tokens)
    offer = TreeOffer(seq_id=7, root=root, tokens=pack_ints(tokens), parents=parents, logps=logps)
    return TreeOffers(epoch=epoch, offers=(offer,))


def test_offers_for_the_present_root_are_drafts(node: Node) -> None:
    clock = Clock()
    drafter = AskingDrafter(node.address, VOCAB, clock=clock)
    assert drafter.draft([request([1, 2])]) == [NO_DRAFT], "nobody answers"
    assert node.verdicts().verdicts[0].tokens == pack_ints([1, 2])
    node.send(offers(1, 2, [5, 6]))  # late: the next question finds it, and waits again
    assert drafter.draft([request([1, 2, 3])]) == [NO_DRAFT]
    assert node.verdicts().epoch == 2
    drafter.end(request([1, 2, 3]).text)
    drafter.draft([])
    assert node.verdicts().ended == pack_ints([7])
    drafter.close()


def test_an_answer_that_is_there_in_time_is_used(node: Node) -> None:
    class Waits(Clock):
        """Time stands still until the answer is there."""

        def __call__(self) -> float:
            return self.now_s

    class Client:
        """Answers every question by the root's successor."""

        def __init__(self, address: str) -> None:
            self.messages: list[Message] = []

        def send(self, message: Verdicts) -> None:
            root = int.from_bytes(message.verdicts[0].tokens[-4:], "little")
            self.messages.append(offers(message.epoch, root, [root + 1]))

        def recv(self, timeout_s: float | None = None) -> Message | None:
            return self.messages.pop(0) if self.messages else None

        def close(self) -> None:
            pass

    connect: type = Client
    drafter = AskingDrafter("unused", VOCAB, connect=connect, clock=Waits())
    for text in ([1, 2], [1, 2, 9], [1, 2, 9, 4]):
        assert drafter.draft([request(text)]) == [Draft.chain([text[-1] + 1], [0.0])]
    assert drafter.num_losses == 0
    assert drafter.draft([request([1, 2, 9, 4, VOCAB - 1])]) == [NO_DRAFT], (
        "the model has no such token"
    )
    assert drafter.num_losses == 1


def test_a_silent_node_is_asked_a_few_times_and_not_waited_for(node: Node) -> None:
    clock = Clock()
    drafter = AskingDrafter(node.address, VOCAB, clock=clock)
    for count in range(2, 3 * MAX_UNANSWERED):
        assert drafter.draft([request([1] * count)]) == [NO_DRAFT]
    epochs = [node.verdicts().epoch for _ in range(MAX_UNANSWERED)]
    assert epochs == list(range(1, MAX_UNANSWERED + 1))
    assert not node.listen(0.0)
    drafter.close()


@pytest.mark.parametrize("end", ["closed", "nonsense"])
def test_a_node_that_ends_is_left_and_found_again(node: Node, end: str) -> None:
    clock = Clock()
    drafter = AskingDrafter(node.address, VOCAB, clock=clock)
    drafter.draft([request([1, 2])])
    node.verdicts()
    if end == "nonsense":
        node.send(Stop(reason="not an offer"))
    else:
        node.server.close()
    tokens = [1, 2]
    while not drafter.num_losses:  # the socket tells it a moment later
        tokens.append(3)
        assert drafter.draft([request(tokens)]) == [NO_DRAFT]
    if end == "closed":
        node.server = ControlServer(node.address)
    clock.now_s += RETRY_S
    drafter.draft([request([1, 2, 3, 4])])
    assert drafter.num_losses == 1
    again = node.verdicts()
    while again.verdicts[0].start:  # of the connection before
        again = node.verdicts()
    assert (again.epoch, again.verdicts[0].start) == (1, 0)
    assert again.verdicts[0].tokens == pack_ints([1, 2, 3, 4])
    drafter.close()
