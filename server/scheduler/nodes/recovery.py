"""The recovery of an engine that has lost a node: the stages of a new generation.

Owns the set of nodes in the engine, the answers awaited and the time of waiting; begins the
generations of formation.py and finds the expert table that the present nodes can serve. Pure:
no socket, no clock, no request. Called by failover.py, which sends a stage's messages and
reports the answers.

    serving --loss, failed step--> halting --all halted--> forming --all ready--> serving
    serving --a node is back, or leaves--> draining --no step left--> halting
    halting --all halted, but experts or attention are missing--> waiting --back--> forming

Every loss begins a new generation, in any stage. A node that reacts too late also counts as lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec

from server.scheduler.nodes.formation import Formation
from server.scheduler.nodes.roster import Member, Replicas
from topspin.expert_table import ExpertTable


class RecoveryStage(Enum):
    """The state of the engine; steps are planned in SERVING only."""

    SERVING = "serving"
    DRAINING = "draining"
    HALTING = "halting"
    WAITING = "waiting"
    FORMING = "forming"


class Recovery:
    """The current stage of the engine's generation.

    Invariant: `nodes` are those that have loaded and are not lost; all of them halt and form
    together. Outside HALTING and FORMING no answer is awaited.
    """

    def __init__(
        self,
        formation: Formation,
        *,
        places: Iterable[Member],
        optional: Iterable[Member] = (),
        halt_deadline_s: float,
        restart_deadline_s: float,
        needs_all: bool,
        may_be_local: tuple[int, ...] = (),
        replicas: Replicas | None = None,
    ) -> None:
        """Start in SERVING, with every node in its place but those that are `optional`.

        `needs_all`: no generation without every place (all nodes live in one process).
        `may_be_local` are the MoE layers whose experts attention nodes hold too.
        """
        self._formation = formation
        self._halt_deadline_s = halt_deadline_s
        self._restart_deadline_s = restart_deadline_s
        self._needs_all = needs_all
        self._may_be_local = may_be_local
        self._replicas = replicas or Replicas()
        # Those that have loaded, of a replica that is not complete.
        self._incomplete: set[Member] = set()
        self.stage = RecoveryStage.SERVING
        self._places = frozenset(places)
        self._optional = frozenset(optional)
        self.nodes = set(self._places - self._optional)
        self._late: set[Member] = set()
        self._leaving: set[Member] = set()
        self._awaited: set[Member] = set()
        self._stage_since_s = 0.0
        self._down_since_s: float | None = None
        self.has_expired = False

    @property
    def is_serving(self) -> bool:
        """Say whether steps may be planned."""
        return self.stage is RecoveryStage.SERVING

    @property
    def waiting_since_s(self) -> float | None:
        """Return when the engine stopped, if the present nodes cannot serve; None: they can."""
        return self._down_since_s if self.stage is RecoveryStage.WAITING else None

    @property
    def was_computing(self) -> bool:
        """Say whether a node may still be in a step."""
        return self.stage not in (RecoveryStage.WAITING, RecoveryStage.FORMING)

    @property
    def absent(self) -> list[Member]:
        """Return the places without a loaded node, for tables."""
        return sorted(self._places - self.nodes, key=str)

    @property
    def missing(self) -> list[Member]:
        """Return those of `absent` that are not optional, for messages."""
        return [place for place in self.absent if place not in self._optional]

    @property
    def awaited(self) -> list[Member]:
        """Return the nodes whose answer the stage waits for."""
        return sorted(self._awaited, key=str)

    def lose(self, member: Member) -> None:
        """Remove a node; the caller then begins a new generation if it was in `nodes`."""
        self.nodes.discard(member)
        self._late.discard(member)
        self._leaving.discard(member)
        self._awaited.discard(member)
        self._incomplete.discard(member)

    def leave(self, member: Member, now: float) -> None:
        """Let a node of `nodes`, and its replica, go with the next generation.

        In SERVING the steps under way end first; in later stages the caller begins a generation.
        """
        self._leaving.update(self._replicas.together(member))
        if self.stage is RecoveryStage.SERVING:
            self.drain(now)

    @property
    def leaving(self) -> list[Member]:
        """Return the nodes that the next generation is without."""
        return sorted(self._leaving, key=str)

    def drain(self, now: float) -> None:
        """Plan no more steps, so that a new generation can begin without losing one."""
        assert self.stage is RecoveryStage.SERVING
        self._enter(RecoveryStage.DRAINING, now)

    def halt(self, now: float) -> None:
        """Begin a new generation: every node must halt."""
        self._formation.begin_generation()
        if self._down_since_s is None:
            self._down_since_s = now
        self.nodes |= self._late
        self._late.clear()
        self._enter(RecoveryStage.HALTING, now)
        self._awaited = set(self.nodes)

    def loaded(self, member: Member, now: float) -> None:
        """Add a node that has loaded late: at once, or after a forming that is in progress.

        While the others serve, they are drained first. Nodes of a replica are added together.
        """
        self._incomplete.add(member)
        together = self._replicas.together(member)
        if not self._incomplete.issuperset(together):
            return
        self._incomplete.difference_update(together)
        if self.stage is RecoveryStage.FORMING:
            self._late.update(together)
            return
        self.nodes.update(together)
        if self.stage is RecoveryStage.SERVING:
            self.drain(now)

    def halted(self, member: Member, generation: int) -> None:
        """Note that a node has halted; the answer to an earlier Halt is ignored."""
        if self.stage is RecoveryStage.HALTING and generation == self._formation.generation:
            self._awaited.discard(member)

    @property
    def has_halted(self) -> bool:
        """Say whether a topology may be made: no node is still in an older generation."""
        return self.stage is RecoveryStage.WAITING or (
            self.stage is RecoveryStage.HALTING and not self._awaited
        )

    def try_form(self, now: float) -> bool:
        """Let the present nodes form with a table that they can serve; False: they must wait."""
        assert self.has_halted
        self._enter(RecoveryStage.WAITING, now)
        if not any(node.role == "attention" for node in self.nodes):
            return False
        if self._needs_all and self.absent:
            return False
        absent = {place.index for place in self.absent if place.role == "expert"}
        formation = self._formation
        table = table_without(
            formation.full_table, absent, current=formation.table, may_be_local=self._may_be_local
        )
        if table is None:
            return False
        if table is not formation.table:
            formation.use_part(table)
        self._enter(RecoveryStage.FORMING, now)
        self._awaited = set(self.nodes)
        return True

    def ready(self, member: Member, generation: int, now: float) -> bool:
        """Note that a node is ready; True once all are, and the engine serves again."""
        if self.stage is not RecoveryStage.FORMING or generation != self._formation.generation:
            return False
        self._awaited.discard(member)
        if self._awaited:
            return False
        self._enter(RecoveryStage.SERVING, now)
        self._down_since_s = None
        self.has_expired = False
        return True

    def take_late(self) -> bool:
        """Add the nodes that loaded while the others formed; True if there are any."""
        found = bool(self._late)
        self.nodes |= self._late
        self._late.clear()
        return found

    def overdue(self, now: float) -> list[Member]:
        """Return the nodes that have not answered in time and so count as dead."""
        limit_s = {
            RecoveryStage.HALTING: self._halt_deadline_s,
            RecoveryStage.FORMING: self._restart_deadline_s,
        }.get(self.stage)
        if limit_s is None or now - self._stage_since_s <= limit_s:
            return []
        return self.awaited

    def expires(self, now: float) -> bool:
        """Return True once, when requests have waited longer than the restart deadline."""
        since_s = self._down_since_s
        if self.has_expired or since_s is None or now - since_s <= self._restart_deadline_s:
            return False
        self.has_expired = True
        return True

    def _enter(self, stage: RecoveryStage, now: float) -> None:
        self.stage = stage
        self._stage_since_s = now
        self._awaited = set()


def table_without(
    full: ExpertTable,
    absent: set[int],
    *,
    current: ExpertTable,
    may_be_local: tuple[int, ...] = (),
) -> ExpertTable | None:
    """Return `full` without the slots of the `absent` expert nodes, under a new version.

    `current` itself if it is the same already; None if an expert has no other replica. Layers of
    `may_be_local` all become local if one of them lacks an expert. The other nodes' slots do not
    change, so no node has to load experts.
    """
    slots = tuple(
        tuple(() if node in absent else experts for node, experts in enumerate(layer))
        for layer in full.slots
    )
    lacking = {
        layer
        for layer, nodes in enumerate(slots)
        if len({expert for experts in nodes for expert in experts}) < full.num_experts
    }.difference(full.local)
    if not lacking <= set(may_be_local):
        return None
    local = may_be_local if lacking else full.local
    if (slots, local) == (current.slots, current.local):
        return current
    return msgspec.structs.replace(full, slots=slots, local=local, version=current.version + 1)
