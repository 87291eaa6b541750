"""cuda_ipc between two real processes: kernels that wait for each other, and a SIGKILL.

Without a GPU both interpret their kernels over shared memory; with one they take turns on it,
which shows that the driver's shared memory is right and says nothing about time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kernels.runtime import open_runtime
from m2n_comm.gpu.ipc_attention import IpcAttentionNet
from m2n_comm.open import connect_attention
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.gpu.ipc_expert_process import (
    ATTENTION_INCARNATION,
    EXPERT_INCARNATION,
    HELD,
    TICKETS,
    process_shape,
)
from tests.m2n_comm.gpu.ipc_fleet import DEVICE
from tests.m2n_comm.harness import NUM_EXPERTS, FakeExperts, Rows, make_table, random_rows
from topspin.errors import PeerLost, TransportError
from topspin.messages import ExpertPeer

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def test_an_expert_process_serves_and_its_death_is_noticed_at_once() -> None:
    shape = process_shape()
    table = make_table(shape, 1)
    fake = FakeExperts(shape, NUM_EXPERTS)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.m2n_comm.gpu.ipc_expert_process"],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            address = process.stdout.readline().strip()
            net = connect_attention(
                Identity(role="attention", index=0, incarnation=ATTENTION_INCARNATION, shape=shape),
                [ExpertPeer(address=address, incarnation=EXPERT_INCARNATION)],
                table,
                Waits(timeout_s=60.0),
                runtime=open_runtime(DEVICE),
            )
            assert isinstance(net, IpcAttentionNet)
            for ticket in TICKETS:
                net.begin(ticket)
                assert net.is_graph_safe == (max(ticket.row_buckets) <= shape.window_rows)
                for layer in range(shape.num_layers):
                    sent = [
                        random_rows(shape, size, choose_from=tuple(range(NUM_EXPERTS)), seed=layer)
                        for size in ticket.row_buckets
                    ]
                    for mb, rows in enumerate(sent):
                        net.dispatch(mb, layer, *on_device(rows))
                    for mb, rows in enumerate(sent):
                        out = torch.empty(rows.hidden.shape, device=DEVICE)
                        net.combine(mb, layer, out)
                        net.settle()
                        want = fake.expected(table, layer, rows)
                        torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-4)
            assert process.stdout.readline() == "served\n"
            net.begin(HELD)
            net.dispatch(0, 0, *on_device(sent[0]))
            assert process.stdout.readline() == "holding\n"
            os.kill(process.pid, signal.SIGKILL)
            start_s = time.monotonic()
            with pytest.raises(PeerLost, match=r"expert 0 closed .*layer 0, micro-batch 0"):
                combine_held(net, sent[0])
            assert time.monotonic() - start_s < 30.0  # the deadline is 60 s
            with pytest.raises(TransportError, match="can not be used any more"):
                net.begin(HELD)
            net.close()
        finally:
            process.kill()


def on_device(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return rows.hidden.to(DEVICE), rows.experts.to(DEVICE), rows.weights.to(DEVICE)


def combine_held(net: IpcAttentionNet, rows: Rows) -> None:
    net.combine(0, 0, torch.empty(rows.hidden.shape, device=DEVICE))
    net.settle()
