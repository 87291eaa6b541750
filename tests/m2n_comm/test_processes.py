"""Two real processes, also on two hosts: the same sums, a SIGKILL noticed at once, nothing leaked.

A host is a network namespace, joined to this one by a virtual cable.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from app.cli.keys import make
from kernels.runtime import open_runtime
from m2n_comm.gpu.ipc_attention import IpcAttentionNet
from m2n_comm.host.tcp import TcpLines
from m2n_comm.open import connect_attention
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.expert_process import (
    ATTENTION_INCARNATION,
    EXPERT_INCARNATION,
    HELD,
    TICKETS,
    process_shape,
)
from tests.m2n_comm.gpu.ipc_fleet import DEVICE
from tests.m2n_comm.harness import NIXL, NUM_EXPERTS, FakeExperts, Rows, make_table, random_rows
from tests.m2n_comm.pairing.meetings import of
from tests.system.rig.hosts import Host
from topspin.errors import PeerLost, TransportError
from topspin.messages import ExpertPeer
from topspin.processes.node_network import ON_ONE_HOST

ON_A_GPU = [pytest.mark.gpu] if torch.cuda.is_available() else []


@pytest.mark.parametrize(
    ("transport", "away"),
    [
        pytest.param("shm", False, marks=pytest.mark.slow),
        ("tcp", True),
        pytest.param("nixl", False, marks=NIXL.marks),
        pytest.param("cuda_ipc", False, marks=[*ON_A_GPU, pytest.mark.slow]),
    ],
)
def test_an_expert_process_serves_and_its_death_is_noticed_at_once(
    transport: str, away: bool, tmp_path: Path
) -> None:
    """An expert node on another host proves a key, and its frames have codes."""
    files = set(Path("/dev/shm").iterdir())
    shape = process_shape()
    table = make_table(shape, 1)
    fake = FakeExperts(shape, NUM_EXPERTS)
    command = [sys.executable, "-m", "tests.m2n_comm.expert_process", transport]
    network, runtime = ON_ONE_HOST, open_runtime(DEVICE) if transport == "cuda_ipc" else None
    with ExitStack() as stack:
        if away:
            keys = tmp_path / "keys"
            make(keys, ["attention", "expert"])
            network = of(keys, "attention", "expert")
            host = other_host(stack)
            command = host.command([*command, host.address, str(keys / "expert")])
        process = stack.enter_context(
            subprocess.Popen(
                command,
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        me = Identity(role="attention", index=0, incarnation=ATTENTION_INCARNATION, shape=shape)
        address = process.stdout.readline().strip()
        peer = ExpertPeer(address=address, incarnation=EXPERT_INCARNATION)
        waits = Waits(timeout_s=60.0)
        net: Any = connect_attention(me, [peer], table, waits, runtime=runtime, network=network)
        if away:
            assert isinstance(net.lines, TcpLines)
            assert net.lines.authenticated == {0: True}
        for ticket in TICKETS:
            net.begin(ticket)
            if isinstance(net, IpcAttentionNet):
                assert net.is_graph_safe == (max(ticket.row_buckets) <= shape.window_rows)
            for layer in range(shape.num_layers):
                sent = [random_rows(shape, size, seed=layer) for size in ticket.row_buckets]
                for mb, rows in enumerate(sent):
                    net.dispatch(mb, layer, *(each.to(net_device(net)) for each in rows))
                for mb, rows in enumerate(sent):
                    want = fake.expected(table, layer, rows)
                    got = combined(net, mb, layer, rows)
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
        assert process.stdout.readline() == "served\n"
        net.begin(HELD)
        net.dispatch(0, 0, *(each.to(net_device(net)) for each in sent[0]))
        assert process.stdout.readline() == "holding\n"
        process.kill()
        start_s = time.monotonic()
        with pytest.raises(PeerLost, match=r"expert 0 closed .*layer 0, micro-batch 0"):
            combined(net, 0, 0, sent[0])
        assert time.monotonic() - start_s < 30.0  # the deadline is 60 s
        with pytest.raises(TransportError, match="can not be used any more"):
            net.begin(HELD)
        net.close()
    assert set(Path("/dev/shm").iterdir()) == files


def other_host(stack: ExitStack) -> Host:
    """Open a host until `stack` is closed; skip the test where that is not permitted."""
    try:
        return stack.enter_context(Host())
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")


def net_device(net: Any) -> str:
    return DEVICE if isinstance(net, IpcAttentionNet) else "cpu"


def combined(net: Any, mb: int, layer: int, rows: Rows) -> torch.Tensor:
    """Return the sum of a dispatch, on the host."""
    out = torch.empty(rows.hidden.shape, device=net_device(net))
    net.combine(mb, layer, out)
    if isinstance(net, IpcAttentionNet):
        net.settle()
    return out.cpu()
