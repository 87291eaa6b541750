"""What both ends of a pair say of it before they form it, and how the two are compared.

Owns the messages and the order in which their fields are checked. Knows no socket: handshake.py
sends them.
"""

from __future__ import annotations

import msgspec

from m2n_comm.host.emulate import LinkEmulation
from m2n_comm.host.wire import PROTOCOL
from m2n_comm.net import NetShape
from topspin.errors import ConfigError, FrameError, StaleFrame, VersionMismatch

_MAX_INCARNATION = 2**64


class PairShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of NetShape that both ends must have alike."""

    hidden_size: int
    top_k: int
    num_layers: int
    payload: str
    window_rows: int
    num_micro_batches: int
    per_pair_answers: bool = False
    request_payload: str = ""


class PairMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the other end may write with nixl, and how to reach it. `bell`: ring me, I block."""

    agent: str
    metadata: bytes
    base: int
    size_bytes: int
    bell: bool


class PairRegion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the other end may write of this one's memory, as m2n_comm.gpu.memory names it."""

    kind: str
    handle: bytes
    size_bytes: int


class PairHello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """What each end says of the pair: first the attention node, then the expert node.

    `generation` tells the pairs of two process lives apart, of which a reformed engine makes
    several. The link to emulate and whether tcp payloads carry a checksum are the attention
    node's choice, which the expert node repeats. `memory` is the sender's own, on nixl only, and
    so is `region`, on cuda_ipc.
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
    checksum: bool = True
    memory: PairMemory | None = None
    region: PairRegion | None = None

    @property
    def link(self) -> LinkEmulation:
        """Return the link to emulate. Raises ConfigError for one that cannot be."""
        return LinkEmulation(latency_us=self.latency_us, gbps=self.gbps)


class PairRefusal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Why the expert node will not form the pair; `code` as in topspin.errors."""

    code: str
    reason: str


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
        per_pair_answers=shape.per_pair_answers,
    )


def make_hello(
    shape: NetShape,
    *,
    attention: int,
    expert: int,
    attention_incarnation: int,
    expert_incarnation: int,
    revision: str,
    generation: int = 1,
    link: LinkEmulation | None = None,
    checksum: bool = True,
) -> PairHello:
    """Return the message of this pair. Raises ConfigError for an incarnation beyond 64 bits."""
    for incarnation in (attention_incarnation, expert_incarnation):
        if not 0 <= incarnation < _MAX_INCARNATION:
            raise ConfigError(f"incarnation {incarnation} does not fit 64 bits")
    link = link or LinkEmulation()
    return PairHello(
        protocol=PROTOCOL,
        revision=revision,
        attention=attention,
        expert=expert,
        attention_incarnation=attention_incarnation,
        expert_incarnation=expert_incarnation,
        shape=pair_shape(shape),
        generation=generation,
        latency_us=link.latency_us,
        gbps=link.gbps,
        checksum=checksum,
    )


def expected_hellos(
    shape: NetShape,
    *,
    expert: int,
    incarnation: int,
    attention_incarnations: tuple[int | None, ...],
    revision: str,
    generation: int,
) -> tuple[PairHello | None, ...]:
    """Return what expert node `expert` awaits from each attention node (None: an absent one)."""
    return tuple(
        None
        if theirs is None
        else make_hello(
            shape,
            attention=attention,
            expert=expert,
            attention_incarnation=theirs,
            expert_incarnation=incarnation,
            revision=revision,
            generation=generation,
        )
        for attention, theirs in enumerate(attention_incarnations)
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
