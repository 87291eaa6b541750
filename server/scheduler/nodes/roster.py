"""The members of the engine: the nodes in their places, and any number of gateways.

Owns the list of members from Hello to Ready, refusals, and the grouping of attention nodes with
their stages (Replicas). Pure: peers are opaque ids, messages
are arguments and return values. Called by service.py, nodes.py, gateways.py and failover.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from topspin.errors import ConfigError, ProtocolError, VersionMismatch
from topspin.expert_table import ExpertTable
from topspin.messages import (
    PROTOCOL_VERSION,
    ExpertPeer,
    Hello,
    Loaded,
    Ready,
    Role,
    Topology,
)

# Files that the refusal of another checkpoint names.
MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class Member:
    """A node's place in the engine."""

    role: Role
    index: int

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(slots=True)
class _Joined:
    peer: bytes
    hello: Hello
    ready: Ready | None = None


def _difference(hello: Hello, first: Hello) -> str:
    """Return a text that says in which files the checkpoints of two nodes differ."""
    names = sorted(hello.files.keys() | first.files.keys())
    other = [name for name in names if hello.files.get(name) != first.files.get(name)]
    shown = ", ".join(other[:MAX_NAMED]) + (", ..." if len(other) > MAX_NAMED else "")
    return (
        f"{hello.role} {hello.index} serves checkpoint {hello.fingerprint[:16]!r}, {first.role} "
        f"{first.index} serves {first.fingerprint[:16]!r}"
        + (f": their contents differ in {shown}" if other else "")
    )


def _peers(hellos: Iterable[Hello | None]) -> tuple[ExpertPeer | None, ...]:
    return tuple(
        None
        if hello is None
        else ExpertPeer(address=hello.data_address, incarnation=hello.incarnation)
        for hello in hellos
    )


class Roster:
    """The list of the engine's nodes.

    Invariant: all nodes in it speak one protocol, run one revision and serve one checkpoint
    (the first node's, also once that node has gone); each place is taken once.
    """

    def __init__(
        self,
        places: Sequence[Member],
        *,
        revision: str,
        stages: Sequence[int] = (),
        optional: Collection[Member] = (),
    ) -> None:
        """`places` are the engine's nodes, by role and ascending.

        `stages` are the attention nodes of its stages, by index. The engine is complete without
        those that are `optional`, which join afterwards.
        """
        self._places = list(places)
        self.optional = frozenset(optional)
        self._required = [place for place in self._places if place not in self.optional]
        self._stages = tuple(stages)
        self._revision = revision
        self._nodes: dict[Member, _Joined] = {}
        self._first: Hello | None = None
        self._member_of: dict[bytes, Member] = {}
        self._num_blocks: dict[Member, int] = {}
        self.gateways: set[bytes] = set()

    def join(self, peer: bytes, hello: Hello) -> None:
        """Add a node or a gateway.

        Raises VersionMismatch or ConfigError with the reason to send in Refused.
        """
        name = Member(hello.role, hello.index)
        self._check_version(peer, hello)
        if hello.role == "gateway":
            self.gateways.add(peer)
            return
        if name in self._nodes:
            raise ConfigError(
                f"{name} is there already (pid {self._nodes[name].hello.pid}); each place is "
                "taken once"
            )
        self._check_fit(name, hello)
        self._nodes[name] = _Joined(peer, hello)
        self._member_of[peer] = name

    def check_spare(self, peer: bytes, hello: Hello) -> None:
        """Raise as join() unless a node could take its place if that were free."""
        self._check_version(peer, hello)
        self._check_fit(Member(hello.role, hello.index), hello)

    def _check_version(self, peer: bytes, hello: Hello) -> None:
        name = Member(hello.role, hello.index)
        if hello.protocol != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"{name} speaks protocol {hello.protocol}, this engine {PROTOCOL_VERSION}"
            )
        if hello.revision != self._revision:
            raise VersionMismatch(
                f"{name} runs revision {hello.revision!r}, this engine {self._revision!r}"
            )
        if peer in self._member_of or peer in self.gateways:
            raise ConfigError(f"{name} said Hello on a connection that has said Hello before")

    def _check_fit(self, name: Member, hello: Hello) -> None:
        if name not in self._places:
            raise ConfigError(
                f"{name} has no place: the engine has {', '.join(map(str, self._places))}"
            )
        first = self._first = self._first or hello
        if first.fingerprint != hello.fingerprint:
            raise VersionMismatch(_difference(hello, first))

    def ready(self, member: Member, message: Ready) -> None:
        """Note that a node is ready.

        Raises ProtocolError if that is not expected now, ConfigError if its cache is empty.
        """
        if not self.is_complete:
            raise ProtocolError(f"{member} reports ready before Welcome")
        node = self._nodes[member]
        if node.ready is not None:
            raise ProtocolError(f"{member} reports ready twice")
        if member.role in ("attention", "stage") and message.num_blocks < 1:
            raise ConfigError(f"{member} has no KV-cache blocks")
        node.ready = message
        self._num_blocks[member] = message.num_blocks

    @property
    def is_complete(self) -> bool:
        """Say whether every place that must be is taken, so that Welcome can be sent."""
        return all(place in self._nodes for place in self._required)

    @property
    def is_ready(self) -> bool:
        """Say whether every node is ready."""
        return self.is_complete and all(node.ready is not None for node in self._nodes.values())

    def awaited(self) -> str:
        """Return a text that names the nodes that the start still waits for."""
        missing = [str(place) for place in self._required if place not in self._nodes]
        if missing:
            return "waiting for " + ", ".join(missing)
        loading = [str(p) for p in self._required if self._nodes[p].ready is None]
        return "loading: " + ", ".join(loading) if loading else ""

    def topology(self, nodes: Iterable[Member], table: ExpertTable, *, generation: int) -> Topology:
        """Return the topology of `generation` with `nodes`, all of which have joined."""
        hellos = {node: self._nodes[node].hello for node in nodes}
        senders = [place for place in self._places if place.role in ("attention", "stage")]
        return Topology(
            generation=generation,
            table=table,
            experts=_peers(hellos.get(each) for each in self._places if each.role == "expert"),
            attention_incarnations=tuple(
                None if hello is None else hello.incarnation for hello in map(hellos.get, senders)
            ),
            stages=_peers(hellos.get(each) for each in senders if each.role == "stage"),
        )

    def has(self, member: Member) -> bool:
        """Say whether a place is taken."""
        return member in self._nodes

    def leave(self, member: Member) -> None:
        """Remove a node; its connection counts as unknown from now on."""
        del self._member_of[self._nodes.pop(member).peer]

    def loaded(self, member: Member, message: Loaded) -> None:
        """Note the cache of a node that joins late.

        Raises ProtocolError if it is empty, or its size has changed.
        """
        if member.role in ("attention", "stage") and message.num_blocks < 1:
            raise ProtocolError(f"{member} has no KV-cache blocks")
        before = self._num_blocks.setdefault(member, message.num_blocks)
        if message.num_blocks != before:
            raise ProtocolError(f"{member} has {message.num_blocks} blocks, it had {before}")

    def member(self, peer: bytes) -> Member | None:
        """Return the place of the node `peer`, None for gateways and unknown peers."""
        return self._member_of.get(peer)

    def describe(self, member: Member) -> str:
        """Return a text that names a node and its process id."""
        return f"{member} (pid {self._nodes[member].hello.pid})"

    def pid(self, member: Member) -> int:
        """Return a node's process id, from its Hello."""
        return self._nodes[member].hello.pid

    def has_served(self, member: Member) -> bool:
        """Say whether a node said Hello again; others may have its process id in a container."""
        return self._nodes[member].hello.generation > 0

    @property
    def places(self) -> list[Member]:
        """Return every place that the engine has."""
        return self._places

    @property
    def members(self) -> list[Member]:
        """Return the places that are taken."""
        return [place for place in self._places if place in self._nodes]

    def peer(self, member: Member) -> bytes:
        """Return the connection of a node that has joined."""
        return self._nodes[member].peer

    def num_blocks(self) -> list[int]:
        """Return each attention node's cache size in blocks, once all are ready; 0: it is absent.

        A sequence has the same blocks on all stages, so the smallest cache counts.
        """
        return [min((each.num_blocks for each in each_of), default=0) for each_of in self._ready()]

    def num_frames(self) -> list[int]:
        """Return how many of them each can have in memory at once."""
        return [min((each.num_frames for each in each_of), default=0) for each_of in self._ready()]

    def _ready(self) -> list[list[Ready]]:
        """Return what each attention node and its stages have said."""
        assert self.is_ready
        said = {place: node.ready for place, node in self._nodes.items()}
        found: list[list[Ready]] = []
        for place in self._places:
            if place.role != "attention":
                continue
            own = [Member("stage", idx) for idx, of in enumerate(self._stages) if of == place.index]
            found.append([ready for each in (place, *own) if (ready := said.get(each)) is not None])
        return found

    def expert_addresses(self) -> list[str]:
        """Return the addresses at which expert nodes accept attention nodes."""
        return [n.hello.data_address for m, n in self._nodes.items() if m.role == "expert"]


class Replicas:
    """The attention replicas of one engine: an attention node, and its stages if it has some.

    A replica serves only with all of its nodes, so the loss of one is the loss of all. `stages` are
    the attention nodes of the stages, by index.
    """

    def __init__(self, stages: Sequence[int] = ()) -> None:
        self._of = {Member("stage", index): of for index, of in enumerate(stages)}

    def stages(self, attention: int) -> list[Member]:
        """Return the stages of an attention node, in the order of their layers."""
        return [stage for stage, of in self._of.items() if of == attention]

    def index(self, member: Member) -> int | None:
        """Return the attention node of a node of its replica; None for other nodes."""
        return member.index if member.role == "attention" else self._of.get(member)

    def together(self, member: Member) -> list[Member]:
        """Return all nodes that serve only together with `member`, and itself."""
        index = self.index(member)
        if index is None:
            return [member]
        return [Member("attention", index), *self.stages(index)]
