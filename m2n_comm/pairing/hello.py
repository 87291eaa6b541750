"""The identity of a node, and the messages in which both ends of a pair exchange it first.

Owns Identity, the messages, and the order in which their fields are compared. Knows no socket:
handshake.py sends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from m2n_comm.emulate import LinkEmulation
from m2n_comm.net import NetShape
from topspin import __version__
from topspin.errors import ConfigError, FrameError, StaleFrame, VersionMismatch

# The version of the handshake and of the protocol after it.
PROTOCOL = 3
_MAX_INCARNATION = 2**64

NodeRole = Literal["attention", "expert"]


def other_role(role: NodeRole) -> NodeRole:
    """Return the role of the peers of a node."""
    return "expert" if role == "attention" else "attention"


class PairShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of NetShape that must be equal at both ends."""

    hidden_size: int
    top_k: int
    num_layers: int
    payload: str
    window_rows: int
    num_micro_batches: int
    per_expert_answers: bool = False
    request_payload: str = ""


class PairMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the other end may write with nixl, and how to reach it. `bell`: wake this end."""

    agent: str
    metadata: bytes
    base: int
    size_bytes: int
    bell: bool


class PairRegion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of this end that the other may write, as m2n_comm.gpu.memory names it."""

    kind: str
    handle: bytes
    size_bytes: int


class PairHello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The message of each end about the pair: first the attention node's, then the expert node's.

    `generation` tells apart the pairs that the same two processes form when the engine reforms.
    The link to emulate is the attention node's choice, which the expert node repeats. `memory` is
    the sender's, on nixl only; so is `region`, on cuda_ipc only.
    """

    protocol: int
    revision: str
    attention: int
    expert: int
    attention_incarnation: int
    expert_incarnation: int
    shape: PairShape
    generation: int = 1
    latency_us: float = 0.0
    gbps: float | None = None
    memory: PairMemory | None = None
    region: PairRegion | None = None

    @property
    def link(self) -> LinkEmulation:
        """Return the link to emulate. Raises ConfigError for an impossible one."""
        return LinkEmulation(latency_us=self.latency_us, gbps=self.gbps)


class PairRefusal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The expert node's reason not to form the pair; `code` as in topspin.errors."""

    code: str
    reason: str


PublicKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class KeyOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The public X25519 keys of an end: the `static` one of its group, and one of this pair."""

    static: PublicKey
    ephemeral: PublicKey


class KeyProof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Says nothing: the code that it is sent with proves its sender's keys."""


def pair_shape(shape: NetShape) -> PairShape:
    """Return the part of `shape` that both ends compare."""
    return PairShape(
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
        num_layers=shape.num_layers,
        payload=str(shape.payload),
        request_payload=str(shape.request_dtype),
        window_rows=shape.window_rows,
        num_micro_batches=shape.num_micro_batches,
        per_expert_answers=shape.per_expert_answers,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """A node's identity for its peers, and the shape of the frames that it exchanges with them.

    `incarnation` identifies this run of the process; `generation` is the engine's, which may
    form pairs again while its processes run. `participant` is the attention node of tickets for
    which it sends (topspin.plan.stages); None: itself.
    """

    role: NodeRole
    index: int
    incarnation: int
    shape: NetShape
    generation: int = 1
    revision: str = __version__
    participant: int | None = None

    @property
    def name(self) -> str:
        """Return the node's name in errors."""
        return f"{self.role} {self.index}"

    @property
    def peer_role(self) -> NodeRole:
        """Return the role of the nodes at the other ends."""
        return other_role(self.role)

    def hello(
        self,
        peer: int,
        incarnation: int,
        *,
        link: LinkEmulation | None = None,
    ) -> PairHello:
        """Return the message of the pair with `peer`, which has that `incarnation`.

        Raises ConfigError for an incarnation beyond 64 bits.
        """
        for number in (self.incarnation, incarnation):
            if not 0 <= number < _MAX_INCARNATION:
                raise ConfigError(f"incarnation {number} does not fit 64 bits")
        ends = ((self.index, self.incarnation), (peer, incarnation))
        attention, expert = ends if self.role == "attention" else ends[::-1]
        link = link or LinkEmulation()
        return PairHello(
            protocol=PROTOCOL,
            revision=self.revision,
            attention=attention[0],
            expert=expert[0],
            attention_incarnation=attention[1],
            expert_incarnation=expert[1],
            shape=pair_shape(self.shape),
            generation=self.generation,
            latency_us=link.latency_us,
            gbps=link.gbps,
        )


def check_hello(got: PairHello, want: PairHello) -> None:
    """Raise StaleFrame, VersionMismatch or FrameError naming the first field that differs."""
    origin = f"handshake of attention {want.attention} with expert {want.expert}"
    for names, error in (
        (("attention_incarnation", "expert_incarnation", "generation"), StaleFrame),
        (("protocol", "revision"), VersionMismatch),
        (("attention", "expert"), FrameError),
    ):
        for name in names:
            if getattr(got, name) != getattr(want, name):
                raise error(
                    f"{origin}: {name} is {getattr(got, name)}, expected {getattr(want, name)}"
                )
    for name in PairShape.__struct_fields__:
        theirs, ours = getattr(got.shape, name), getattr(want.shape, name)
        if theirs != ours:
            raise FrameError(f"{origin}: {name} is {theirs}, expected {ours}")
