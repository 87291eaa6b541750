"""tcp between two hosts: two network namespaces, joined by a virtual cable."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.cli.keys import make
from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.tcp import TcpLines
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.expert_process import ATTENTION_INCARNATION, EXPERT_INCARNATION, STEPS
from tests.m2n_comm.faults import Delay, FaultInjector
from tests.m2n_comm.harness import FakeExperts, make_shape, make_table, make_ticket, random_rows
from tests.m2n_comm.pairing.meetings import of
from topspin.errors import ConfigError
from topspin.messages import ExpertPeer
from topspin.processes.node_network import NodeNetwork

OURS, THEIRS = "10.213.77.1", "10.213.77.2"


def ip(*arguments: str) -> None:
    """Run `ip`; skip the test where that is not permitted or `ip` is missing."""
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("the ip command is not installed")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"ip {' '.join(arguments)}: {error.stderr.strip()}")


@pytest.fixture
def other_host() -> Iterator[str]:
    """Make a network namespace with address THEIRS; yields its name."""
    tag = secrets.token_hex(3)
    name, here, there = f"topspin-{tag}", f"tsa{tag}", f"tsb{tag}"
    ip("netns", "add", name)
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        ip("address", "add", f"{OURS}/30", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "address", "add", f"{THEIRS}/30", "dev", there)
        ip("-n", name, "link", "set", there, "up")
        yield name
    finally:
        # The virtual cable is deleted with the namespace.
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_rows_travel_between_two_hosts_with_codes(other_host: str, tmp_path: Path) -> None:
    """Some of them late."""
    keys = tmp_path / "keys"
    make(keys, ["attention", "expert"])
    shape, table = make_shape(), make_table(make_shape(), 1)
    fake = FakeExperts(shape, 7)
    command = [sys.executable, "-m", "tests.m2n_comm.expert_process", "tcp", THEIRS]
    command.append(str(keys / "expert"))
    process = subprocess.Popen(
        ["ip", "netns", "exec", other_host, *command],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith(f"tcp:{THEIRS}:")
        me = Identity(role="attention", index=0, incarnation=ATTENTION_INCARNATION, shape=shape)
        peer = ExpertPeer(address=address, incarnation=EXPERT_INCARNATION)
        mine = of(keys, "attention", "expert")
        net = connect_attention(me, [peer], table, Waits(timeout_s=20.0), network=mine)
        assert isinstance(net, AttentionSide)
        assert isinstance(net.lines, TcpLines)
        assert net.lines.authenticated == {0: True}
        delays = FaultInjector({frame: Delay(0.01) for frame in range(20, 40, 3)})
        for step in range(1, STEPS + 1):
            if step == 3:
                delays.attach(net)
            net.begin(make_ticket(step, m=2))
            for layer in range(shape.num_layers):
                for mb, size in enumerate((5, 8 * step - 7)):
                    rows = random_rows(shape, size, choose_from=tuple(range(7)), seed=step)
                    net.dispatch(mb, layer, rows.hidden, rows.experts, rows.weights)
                    got = net.combine(mb, layer, torch.empty(rows.hidden.shape))
                    want = fake.expected(table, layer, rows)
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
        assert process.stdout.readline() == "served\n"
        assert delays.remaining == 0
        net.close()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_other_hosts_are_reached_only_with_keys() -> None:
    with pytest.raises(ConfigError, match=r"'0\.0\.0\.0' is not an IPv4 loopback .* need keys"):
        listen_expert("tcp", NodeNetwork("0.0.0.0"))
    me = Identity(role="attention", index=0, incarnation=1, shape=make_shape())
    peer = ExpertPeer(address=f"tcp:{THEIRS}:5", incarnation=2)
    with pytest.raises(ConfigError, match=r"not an IPv4 loopback address .* nodes need keys"):
        connect_attention(me, [peer], make_table(make_shape(), 1), Waits(timeout_s=1.0))
