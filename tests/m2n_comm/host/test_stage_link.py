"""Rows between an attention node and its stage: they arrive as they are, or an error says why."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import pytest
import torch

from m2n_comm.emulate import LinkEmulation
from m2n_comm.host.stage_link import StageLink
from m2n_comm.net import NetTimes
from m2n_comm.open import connect_stage, listen_expert
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.harness import make_shape, make_ticket
from tests.m2n_comm.pairing.test_reform import give_up
from topspin.errors import (
    DeadlineExceeded,
    FrameError,
    Interrupted,
    PeerLost,
    StaleFrame,
    TransportError,
)
from topspin.messages import ExpertPeer, StepTicket

TIMEOUT_S = 10.0
SHAPE = make_shape(
    top_k=1, num_layers=1, payload=torch.bfloat16, window_rows=16, num_micro_batches=3,
    deadline_s=TIMEOUT_S,
)  # fmt: skip
Between = Literal["shm", "tcp"]
both = pytest.mark.parametrize("transport", ["shm", "tcp"])


def pair(
    transport: Between,
    *,
    link: LinkEmulation | None = None,
    deadline_s: float = TIMEOUT_S,
    check: Callable[[], None] = lambda: None,
) -> tuple[StageLink, StageLink]:
    """Return the ends of attention node 1 and stage 2; the first waits as the arguments say."""
    listener = listen_expert(transport)
    stage = Identity(role="expert", index=2, incarnation=7, shape=SHAPE)
    head = Identity(
        role="attention", index=1, incarnation=51, shape=replace(SHAPE, deadline_s=deadline_s)
    )
    peer = ExpertPeer(address=listener.address, incarnation=7)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept_head, stage, 1, 51, Waits(timeout_s=TIMEOUT_S))
        first = connect_stage(head, 2, peer, Waits(timeout_s=TIMEOUT_S, check=check), link=link)
        second = accepted.result()
    listener.close()
    return first, second


def ticket(step: int = 1) -> StepTicket:
    return make_ticket(step, participants=(1,), m=3)


def rows(count: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, SHAPE.hidden_size, generator=generator).to(SHAPE.payload)


@both
@pytest.mark.parametrize("link", [None, LinkEmulation(latency_us=100.0, gbps=10.0)])
def test_rows_pass_unchanged_in_both_directions(
    transport: Between, link: LinkEmulation | None
) -> None:
    head, stage = pair(transport, link=link)
    for step in (1, 2):
        head.begin(ticket(step))
        stage.begin(ticket(step))
        sent = [rows(count, seed=step * count) for count in (1, 16, 5)]
        for micro_batch, each in enumerate(sent):
            head.send(micro_batch, each)
        for micro_batch, each in enumerate(sent):
            found = torch.empty_like(each)
            stage.receive(micro_batch, found)
            assert torch.equal(found, each)
            stage.send(micro_batch, -found, NetTimes(step + 0.25, 0.5, None))
        for micro_batch, each in enumerate(sent):
            found = torch.empty_like(each)
            head.receive(micro_batch, found)
            assert torch.equal(found, -each)
        assert head.times == NetTimes(step + 0.25, 0.5, None)
    head.close()
    stage.close()


@both
def test_a_frame_of_another_step_or_size_is_refused(transport: Between) -> None:
    head, stage = pair(transport)
    head.begin(ticket(1))
    stage.begin(ticket(2))
    head.send(0, rows(3))
    with pytest.raises(StaleFrame, match=r"frame of attention 1.*step is 1, expected 2"):
        stage.receive(0, rows(3))
    with pytest.raises(TransportError, match="can not be used any more"):
        stage.begin(ticket(1))
    head.close()
    stage.close()
    head, stage = pair(transport)
    head.begin(ticket())
    stage.begin(ticket())
    head.send(1, rows(3))
    with pytest.raises(FrameError, match="rows is 3, expected 4"):
        stage.receive(1, rows(4))
    with pytest.raises(FrameError, match="17 rows to stage 2, of 16"):
        head.send(0, rows(17))
    head.close()
    stage.close()


@both
def test_every_wait_ends(transport: Between) -> None:
    head, stage = pair(transport, deadline_s=0.01)
    head.begin(ticket())
    with pytest.raises(DeadlineExceeded, match="stage 2"):
        head.receive(0, rows(1))
    head.close()
    stage.begin(ticket())
    with pytest.raises(PeerLost, match="attention 1 closed"):
        stage.receive(0, rows(1))
    stage.close()
    head, stage = pair(transport, check=give_up)
    head.begin(ticket())
    with pytest.raises(Interrupted):
        head.receive(0, rows(1))
    head.close()
    stage.close()
