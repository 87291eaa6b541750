"""Nets of a reformed engine: absent peers, later generations, cancelled waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from m2n_comm.net import ExpertNet
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.pairing.addresses import Between
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.harness import NIXL, make_shape, make_table
from tests.m2n_comm.pairing.meetings import Meeting
from tests.m2n_comm.pairing.test_open import BETWEEN
from topspin.errors import DeadlineExceeded, Interrupted, ProtocolError, StaleFrame
from topspin.expert_table import ExpertTable
from topspin.messages import ExpertPeer, StepTicket


def give_up() -> None:
    raise Interrupted("the scheduler has sent Halt")


def ticket(participants: tuple[int, ...]) -> StepTicket:
    return StepTicket(
        step=1,
        previous=0,
        generation=2,
        table_version=1,
        num_micro_batches=1,
        participants=participants,
        row_buckets=(4,),
    )


@pytest.mark.parametrize("num_windows", [1, 3])
@pytest.mark.parametrize("transport", BETWEEN)
def test_a_pair_works_beside_absent_peers(transport: Between, num_windows: int) -> None:
    """Attention 1 and expert 1 of two each; expert 1 holds all experts."""
    shape = make_shape()
    num_rows = (num_windows - 1) * shape.window_rows + 3
    everything = tuple(range(make_table(shape, 1).num_experts))
    table = ExpertTable(1, len(everything), (((), everything),) * shape.num_layers)
    listener = listen_expert(transport)
    peer = ExpertPeer(address=listener.address, incarnation=7)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(
            listener.accept,
            Identity(role="expert", index=1, incarnation=7, shape=shape, generation=2),
            (None, 51),
            table,
            Waits(timeout_s=10.0),
        )
        me = Identity(role="attention", index=1, incarnation=51, shape=shape, generation=2)
        net = connect_attention(me, [None, peer], table, Waits(timeout_s=10.0))
        expert = accepted.result()
        with pytest.raises(ProtocolError, match="participants"):
            expert.begin(ticket((0, 1)))
        answered = pool.submit(double, expert)
        net.begin(ticket((1,)))
        hidden = torch.arange(num_rows * shape.hidden_size).view(num_rows, -1).to(shape.payload)
        experts = torch.arange(shape.top_k).expand(num_rows, -1).contiguous()
        net.dispatch(0, 0, hidden, experts, torch.ones(num_rows, shape.top_k))
        out = net.combine(0, 0, torch.full((num_rows, shape.hidden_size), torch.nan))
        answered.result()
        assert torch.equal(out, 2 * hidden.float())
        absent_holds = ExpertTable(2, len(everything), ((everything, ()),) * shape.num_layers)
        with pytest.raises(ProtocolError, match="absent"):
            net.set_table(absent_holds)
        net.close()
        expert.close()
    listener.close()


def double(expert: ExpertNet) -> None:
    expert.begin(ticket((1,)))
    for batch in expert.gather(0, 0):
        expert.reply(batch, 2 * batch.hidden)


@pytest.mark.parametrize("transport", BETWEEN)
def test_an_address_is_used_again_and_tells_generations_apart(transport: Between) -> None:
    with ThreadPoolExecutor(3) as pool:
        meeting = Meeting(transport, pool)
        first = meeting.accept(generation=1, reuse=True)
        meeting.connect(generation=1)
        first.result()
        second = meeting.accept(generation=2, reuse=True)
        with pytest.raises(StaleFrame, match="generation"):
            meeting.connect(generation=1)  # it had not been told of the end of its generation
        meeting.connect(generation=2)
        second.result()
        meeting.close()


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow), NIXL])
def test_meetings_and_steps_can_be_given_up(transport: Between) -> None:
    with ThreadPoolExecutor(3) as pool:
        meeting = Meeting(transport, pool)
        with pytest.raises(Interrupted):
            meeting.connect(check=give_up)  # no expert node accepts
        with pytest.raises(Interrupted):
            meeting.accept(check=give_up, num_attention=2, reuse=True).result()
        with pytest.raises(DeadlineExceeded):
            meeting.accept(timeout_s=0.1, num_attention=2, reuse=True).result()
        meeting.close()


@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.slow), "tcp", NIXL])
def test_a_step_that_waits_is_given_up(transport: Between) -> None:
    shape = make_shape()
    given_up: list[bool] = []

    def halt() -> None:
        if given_up:
            give_up()

    with ThreadPoolExecutor(3) as pool:
        meeting = Meeting(transport, pool)
        accepted = meeting.accept(check=halt, reuse=True)
        net = meeting.connect(check=halt)
        expert = accepted.result()
        step = ticket((0,))
        expert.begin(step)
        net.begin(step)
        hidden = torch.zeros((1, shape.hidden_size), dtype=shape.payload)
        experts = torch.arange(shape.top_k).view(1, -1)
        given_up.append(True)
        with pytest.raises(Interrupted):
            next(expert.gather(0, 0))
        net.dispatch(0, 0, hidden, experts, torch.ones(1, shape.top_k))
        with pytest.raises(Interrupted):
            net.combine(0, 0, torch.empty(1, shape.hidden_size))
        meeting.close()
