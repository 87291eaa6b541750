"""Nothing grows: memory and descriptors are allocated at start and freed at close."""

from __future__ import annotations

import gc
import os
import tracemalloc

import pytest
import torch

from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.frames.windows import PairLayout
from tests.m2n_comm.harness import (
    NIXL,
    TRANSPORTS,
    Transport,
    make_shape,
    make_ticket,
    open_fleet,
    random_rows,
)
from tests.pairwise import few
from topspin.messages import StepTicket


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_steps_take_nothing_that_is_not_given_back(transport: Transport) -> None:
    fleet = open_fleet(transport, 1, 2, shape=make_shape(num_layers=1))
    warm, half, steps = 20, 120, 220
    seen: dict[int, tuple[int, int, int]] = {}
    rows = [random_rows(fleet.shape, n, seed=n) for n in (3, 13)]
    outs = [torch.empty(sent.hidden.shape) for sent in rows]

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        for mb, sent in enumerate(rows):
            net.dispatch(mb, 0, *sent)
        for mb, out in enumerate(outs):
            net.combine(mb, 0, out)
        if ticket.step in (warm, half, steps):
            gc.collect()
            traced = tracemalloc.get_traced_memory()[0]
            num_fds = len(os.listdir("/proc/self/fd"))
            seen[ticket.step] = (traced, num_fds, net.registered_bytes)

    tracemalloc.start()
    try:
        assert fleet.run([make_ticket(s, m=2) for s in range(1, steps + 1)], attention) == {}
    finally:
        tracemalloc.stop()
        fleet.close()
    assert seen[steps][1:] == seen[half][1:] == seen[warm][1:]
    # 100 steps are 900 frames: 10 bytes per frame are noise of the interpreter. What is made once,
    # late (a cache of another part of the process), is in one half only; a leak is in both.
    grown = [seen[half][0] - seen[warm][0], seen[steps][0] - seen[half][0]]
    assert min(grown) < 10_000, grown


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_registered_bytes_count_every_window(transport: Transport) -> None:
    fleet = open_fleet(transport, 1, 2)
    pair = PairLayout(fleet.shape).total_bytes
    assert fleet.attention[0].registered_bytes == 2 * pair
    joined = fleet.shape.window_rows * (24 * 4 + 3 * 4 + 3 * 4)
    own_windows = 0 if transport == "local" else pair
    assert fleet.experts[0].registered_bytes == own_windows + joined
    fleet.close()


@pytest.mark.parametrize("failed", few([False, True], True))
@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow), NIXL])
def test_close_gives_all_descriptors_back(transport: Transport, failed: bool) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        if failed:
            net.dispatch(0, 0, torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1))
        for layer in range(2):
            rows = random_rows(net.shape, 9, choose_from=(1, 4, 6), seed=1)
            net.dispatch(0, layer, *rows)
            net.combine(0, layer, torch.empty(rows.hidden.shape))

    fleet = open_fleet(transport, 1, 2)
    assert bool(fleet.run([make_ticket(1)], attention)) == failed
    fleet.close()
    # Although `fleet` still holds the closed nets, and a failure holds its traceback.
    assert len(os.listdir("/proc/self/fd")) <= before
