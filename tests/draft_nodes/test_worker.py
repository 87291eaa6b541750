"""The draft node on real sockets: verdicts in, offers out, nonsense dropped, counters told."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.cli.keys import make
from app.launch.engine import with_draft_addresses
from app.launch.role import peer_groups
from draft_nodes.worker import COUNTS_INTERVAL_S, DraftWorker
from spec_decode.forest import Growth
from tests.server.scheduler.engine import make_config
from tests.spec_decode.table import Table
from topspin.errors import PeerLost
from topspin.expert_table import uniform_table
from topspin.messages import (
    DraftCounts,
    Hello,
    Message,
    Ready,
    Stop,
    Topology,
    TreeOffers,
    Verdict,
    Verdicts,
    Welcome,
    pack_ints,
)
from topspin.plan.settings import FailoverPolicy
from topspin.processes.channel import ControlClient, ControlServer, Received
from topspin.processes.keys import KeyDirectory
from topspin.processes.node_life import run_node
from topspin.processes.node_network import ON_ONE_HOST, NodeNetwork

TIMEOUT_S = 30.0


class Model(Table):
    """A draft model with the attribute that the worker reads."""

    max_length = 100


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Clock:
    """Each look is a little later."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += COUNTS_INTERVAL_S / 50
        return self.now_s


class World:
    """A draft node in a thread, and its scheduler."""

    def __init__(self, *, keys: Path | None = None) -> None:
        """With `keys` it listens on loopback tcp, for attention nodes."""
        address = f"ipc://@topspin-test-{secrets.token_hex(8)}"
        self._address = address
        self.scheduler = ControlServer(address)
        self.status: list[int] = []
        config = make_config(draft_nodes=1, failover=FailoverPolicy(restart=True))
        plan = with_draft_addresses(config, address)
        network, own = ON_ONE_HOST, None
        if keys is not None:
            [draft] = plan.drafts
            others = [each for each in plan.nodes if each != draft]
            plan = replace(plan, nodes=(*others, replace(draft, address=free_address())))
            groups = peer_groups(plan, plan.drafts[0])
            network = NodeNetwork(keys=KeyDirectory(keys / "draft", "draft"), peers=groups)
            own = KeyDirectory(keys / "attention", "attention")
        model: Any = Model()

        def body(control: ControlClient) -> None:
            growth = Growth(passes=3, width=2, num_top=2)
            worker = DraftWorker(
                control,
                index=0,
                load=lambda config: (model, growth),
                clock=Clock(),
                network=network,
            )
            worker.serve()

        def run() -> None:
            self.status.append(
                run_node("draft", 0, address, logger=logging.getLogger("draft"), body=body)
            )

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        table = uniform_table(num_layers=1, num_experts=2, num_nodes=1)
        topology = Topology(table=table, experts=(), attention_incarnations=())
        self._welcome = Welcome(config=plan.for_node("draft"), topology=topology)
        self._welcome_node()
        node = plan.drafts[0].address
        assert node is not None
        self.address = node
        self.target = ControlClient(node, keys=own, server="draft")

    def _welcome_node(self) -> None:
        hello = self.hear(Hello)
        assert (hello.role, hello.fingerprint) == ("draft", "")
        self.tell(self._welcome)
        assert self.hear(Ready).role == "draft"

    def replace_scheduler(self) -> None:
        self.scheduler.close()
        self.scheduler = ControlServer(self._address)
        self._welcome_node()

    def hear(self, kind: type[Any]) -> Any:
        """Return the next message of a kind to the scheduler."""
        while True:
            for event in self.scheduler.poll(TIMEOUT_S):
                assert isinstance(event, Received), event
                self.peer = event.peer
                if isinstance(event.message, kind):
                    return event.message

    def tell(self, message: Message) -> None:
        assert self.scheduler.send(self.peer, message)

    def ask(self, verdicts: Message) -> TreeOffers:
        self.target.send(verdicts)
        answer = self.target.recv(TIMEOUT_S)
        assert isinstance(answer, TreeOffers)
        return answer

    def stop(self) -> None:
        self.tell(Stop(reason="over"))
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self.target.close()
        self.scheduler.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.stop()
    assert made.status == [0]


def verdicts(epoch: int, start: int, *tokens: int) -> Verdicts:
    own = Verdict(seq_id=7, start=start, tokens=pack_ints(tokens), at_most=3, num_prompt=2)
    return Verdicts(epoch=epoch, verdicts=(own,))


def test_verdicts_are_answered_and_counted(world: World) -> None:
    answer = world.ask(verdicts(1, 0, 1, 2))
    assert (answer.epoch, answer.offers[0].seq_id, answer.offers[0].root) == (1, 7, 2)
    first = answer.offers[0].tokens[:4]
    again = world.ask(verdicts(2, 2, int.from_bytes(first, "little")))
    assert again.offers[0].tokens
    counts = world.hear(DraftCounts)
    while not counts.num_root_hits:
        counts = world.hear(DraftCounts)
    assert counts.num_root_misses == 0, "the warm-up does not count"
    assert counts.num_passes >= 1
    assert counts.pass_seconds > 0


def test_what_is_no_verdict_is_dropped(world: World) -> None:
    world.target.send(Stop(reason="a target may not"))
    world.target.send(Verdicts(epoch=1, ended=b"abc"))
    assert world.ask(verdicts(2, 0, 1, 2)).epoch == 2


def test_a_target_that_leaves_is_forgotten(world: World) -> None:
    node = world.target
    world.ask(verdicts(1, 0, 1, 2))
    assert world.ask(verdicts(2, 9, 3)).unknown == pack_ints([7]), "it has two tokens, not nine"
    node.send(Verdicts(epoch=3, ended=pack_ints([7])))
    assert world.ask(verdicts(4, 2, 3)).epoch in (3, 4)


def test_trees_outlive_the_scheduler(world: World) -> None:
    world.ask(verdicts(1, 0, 1, 2))
    world.replace_scheduler()
    answer = world.ask(verdicts(2, 2, 3))
    assert (answer.epoch, answer.unknown) == (2, b"")


def test_only_attention_nodes_are_let_in_and_only_draft_nodes_are_asked(tmp_path: Path) -> None:
    """Other groups of the same engine have keys that are accepted, but not on this link."""
    keys = tmp_path / "keys"
    make(keys, ["scheduler", "gateway", "attention", "expert", "draft"])
    world = World(keys=keys)
    begun = verdicts(1, 0, 1, 2)
    assert world.ask(begun).epoch == 1
    for group in ("expert", "gateway", "draft"):
        peer = KeyDirectory(keys / group, group)
        with closing(ControlClient(world.address, keys=peer, server="draft")) as client:
            client.send(begun)
            with pytest.raises(PeerLost, match="in the handshake"):
                client.recv(TIMEOUT_S)
    attention = KeyDirectory(keys / "attention", "attention")
    for group in ("expert", "scheduler"):
        address = free_address()
        impostor = ControlServer(address, keys=KeyDirectory(keys / group, group))
        client = ControlClient(address, keys=attention, server="draft")
        refused = pytest.raises(PeerLost, match="in the handshake")
        with closing(impostor), closing(client), refused:
            client.recv(TIMEOUT_S)
    assert world.ask(Verdicts(epoch=2)).epoch == 2
    world.stop()
