"""The life cycle of nodes and gateways: join, form an engine, form again after a loss, leave.

Sent by every node and gateway and by the scheduler; see topspin.messages.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from topspin.expert_table import ExpertTable
from topspin.messages.base import PROTOCOL_VERSION, Message, Role
from topspin.plan.spec import NodeConfig


class Hello(Message, frozen=True, kw_only=True):
    """A worker or gateway introduces itself.

    `fingerprint` names the checkpoint's contents (empty for draft nodes and gateways), `files` has
    the digest of each of its files; `data_address` is the address at which an expert node or a
    stage accepts attention nodes ("unix:@NAME", "tcp:HOST:PORT", either of them behind "nixl:",
    "local"; empty otherwise). `incarnation` is unique to this connection of this
    process. `generation` is the last one in which the node took part, with another scheduler.
    """

    role: Role
    index: int
    incarnation: int
    revision: str
    fingerprint: str = ""
    files: dict[str, str] = msgspec.field(default_factory=dict)
    data_address: str = ""
    pid: int = 0
    generation: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    protocol: int = PROTOCOL_VERSION


class ExpertPeer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address of an expert node, or a stage, and its process's incarnation."""

    address: str
    incarnation: int


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's nodes in one generation, by index; None: that node is absent.

    Pairs, steps and results belong to a generation. An absent expert node holds no experts
    in `table`. `attention_incarnations` are followed by those of `stages`, which send rows to
    expert nodes too.
    """

    table: ExpertTable
    experts: tuple[ExpertPeer | None, ...]
    attention_incarnations: tuple[int | None, ...]
    stages: tuple[ExpertPeer | None, ...] = ()
    generation: int = 1


class Welcome(Message, frozen=True, kw_only=True):
    """Sent to every node once all nodes of the engine have said Hello.

    A node that comes later (`joins_late`) gets it at once: it loads the experts that the table
    gives it, sends Loaded, and connects on a Reform.
    """

    config: NodeConfig
    topology: Topology
    joins_late: bool = False

    @property
    def table(self) -> ExpertTable:
        """Return the topology's expert table."""
        return self.topology.table


class Refused(Message, frozen=True, kw_only=True):
    """The peer may not take part; it logs the reason and exits with a failure.

    `is_before_hello`: the scheduler does not know the peer. libzmq connects again by itself,
    without a Hello, so this may answer words for another scheduler, which has ended.
    """

    reason: str
    is_before_hello: bool = False


class Ready(Message, frozen=True, kw_only=True):
    """A node has loaded, connected and warmed up. `num_blocks` is 0 for expert nodes.

    Only `num_frames` of an attention node's blocks are in memory at once.
    """

    role: Role
    index: int
    num_blocks: int = 0
    num_frames: int = 0
    load_s: float = 0.0
    generation: int = 1


class NodeMemory(Message, frozen=True, kw_only=True):
    """The memory of a node's process: sent once it is ready, and from time to time while it serves.

    `resident_bytes` as topspin.process.resident_bytes(); nodes of one process all have all of it.
    """

    role: Role
    index: int
    resident_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Stop(Message, frozen=True, kw_only=True):
    """Orderly shutdown of the engine, or of a node that leaves: end the step, close, exit 0."""

    reason: str


class Leaving(Message, frozen=True, kw_only=True):
    """A node was asked to end: the engine is to do without it, and then to send it Stop.

    Until then it takes part as before.
    """

    role: Role
    index: int


class Goodbye(Message, frozen=True, kw_only=True):
    """Sent by a node before it exits because of an internal error, named here."""

    role: Role
    index: int
    code: str
    message: str


# Failover.


class Loaded(Message, frozen=True, kw_only=True):
    """A node that joins late has loaded and warmed up; it has no connections yet.

    `num_blocks` and `num_frames` are Ready's.
    """

    role: Role
    index: int
    num_blocks: int = 0
    num_frames: int = 0
    load_s: float = 0.0


class Halt(Message, frozen=True, kw_only=True):
    """Generation `generation` begins: drop all steps and sequences, close the net.

    Ends a step's waits. Steps sent before it are not answered.
    """

    generation: int


class Halted(Message, frozen=True, kw_only=True):
    """The node has closed its net and keeps nothing of earlier generations but its weights
    and (attention) its cache."""

    role: Role
    index: int
    generation: int


class Reform(Message, frozen=True, kw_only=True):
    """Sent once every node named in `topology` has halted: connect again and send Ready."""

    topology: Topology


# Expert tables.


class PrepareTable(Message, frozen=True, kw_only=True):
    """To every node: prepare to run steps whose ticket names this table, then send TablePrepared.

    Steps of the table in use go on meanwhile. A newer PrepareTable replaces one that was
    not answered. One of a version that was prepared replaces that table: a node refused it, so
    no step names it.
    """

    table: ExpertTable


class TablePrepared(Message, frozen=True, kw_only=True):
    """The node can run steps of table `version`: routes are known, or weights are read.

    With a `refusal` (the reason) it cannot, and keeps the table in use.
    """

    role: Role
    index: int
    version: int
    refusal: str = ""
