"""Two real processes: the same sums, a SIGKILL noticed at once, nothing leaked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from m2n_comm.open import connect_attention
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.expert_process import ATTENTION_INCARNATION, EXPERT_INCARNATION, STEPS
from tests.m2n_comm.harness import (
    NIXL,
    FakeExperts,
    make_shape,
    make_table,
    make_ticket,
    random_rows,
)
from topspin.errors import PeerLost, TransportError
from topspin.messages import ExpertPeer


# tests/system/test_hosts.py kills a node behind TCP.
@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow), NIXL])
def test_an_expert_process_serves_and_its_death_is_noticed_at_once(transport: str) -> None:
    files = set(Path("/dev/shm").iterdir())
    shape = make_shape()
    table = make_table(shape, 1)
    fake = FakeExperts(shape, 7)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.m2n_comm.expert_process", transport],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        me = Identity(role="attention", index=0, incarnation=ATTENTION_INCARNATION, shape=shape)
        address = process.stdout.readline().strip()
        peer = ExpertPeer(address=address, incarnation=EXPERT_INCARNATION)
        net = connect_attention(me, [peer], table, Waits(timeout_s=20.0))
        for step in range(1, STEPS + 1):
            net.begin(make_ticket(step, m=2))
            for layer in range(shape.num_layers):
                rows = [
                    random_rows(shape, size, choose_from=tuple(range(7)), seed=step + size)
                    for size in (5, 8 * step - 7)
                ]
                for mb, sent in enumerate(rows):
                    net.dispatch(mb, layer, sent.hidden, sent.experts, sent.weights)
                for mb, sent in enumerate(rows):
                    got = net.combine(mb, layer, torch.empty(sent.hidden.shape))
                    want = fake.expected(table, layer, sent)
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
        assert process.stdout.readline() == "served\n"
        net.begin(make_ticket(STEPS + 1))
        net.dispatch(0, 0, rows[0].hidden, rows[0].experts, rows[0].weights)
        assert process.stdout.readline() == "holding\n"
        os.kill(process.pid, signal.SIGKILL)
        start_s = time.monotonic()
        with pytest.raises(PeerLost, match=r"expert 0 closed .*layer 0, micro-batch 0"):
            net.combine(0, 0, torch.empty(rows[0].hidden.shape))
        assert time.monotonic() - start_s < 10.0  # the deadline is 20 s
        with pytest.raises(TransportError, match="can not be used any more"):
            net.begin(make_ticket(STEPS + 2))
        net.close()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert set(Path("/dev/shm").iterdir()) == files
