"""The stages of a recovery and the tables of the new generations, without messages."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest

from server.scheduler.nodes.formation import Formation
from server.scheduler.nodes.recovery import Recovery, Stage, table_without
from server.scheduler.nodes.replicas import Replicas
from server.scheduler.nodes.roster import Member
from topspin.expert_table import ExpertTable, uniform_table

A0, A1 = Member("attention", 0), Member("attention", 1)
E0, E1 = Member("expert", 0), Member("expert", 1)
EVERYONE = {A0, A1, E0, E1}
UNIFORM = uniform_table(num_layers=2, num_experts=4, num_nodes=2)
REDUNDANT = ExpertTable(7, 4, (((0, 1, 2, 3), (2, 3, 0, 1)),) * 2)


class World(NamedTuple):
    """A recovery and its formation."""

    recovery: Recovery
    formation: Formation


def make(
    table: ExpertTable = UNIFORM,
    *,
    needs_all: bool = False,
    may_be_local: tuple[int, ...] = (),
) -> World:
    formation = Formation(table)
    recovery = Recovery(
        formation,
        places=EVERYONE,
        halt_deadline_s=2.0,
        restart_deadline_s=10.0,
        needs_all=needs_all,
        may_be_local=may_be_local,
    )
    return World(recovery, formation)


def halt_all(world: World, now: float) -> None:
    recovery, formation = world
    recovery.halt(now)
    for member in list(recovery.awaited):
        recovery.halted(member, formation.generation)


def test_a_lost_attention_node_leaves_the_others_serving() -> None:
    recovery, formation = make()
    recovery.lose(A0)
    recovery.halt(1.0)
    assert formation.generation == 2
    assert recovery.awaited == [A1, E0, E1]
    recovery.halted(A1, 1)  # of an earlier generation
    assert recovery.awaited == [A1, E0, E1]
    for member in (A1, E0, E1):
        assert not recovery.has_halted
        recovery.halted(member, 2)
    assert recovery.has_halted
    assert recovery.try_form(1.1)
    assert formation.table is UNIFORM
    assert recovery.stage is Stage.FORMING
    assert not recovery.ready(A1, 2, 1.2)
    assert not recovery.ready(E0, 1, 1.2)
    assert not recovery.ready(E0, 2, 1.2)
    assert recovery.ready(E1, 2, 1.3)
    assert recovery.is_serving
    assert recovery.absent == [A0]


def test_a_generation_comes_after_all_that_any_node_has_been_in() -> None:
    """One that joins late may have been in those of an earlier scheduler."""
    recovery, formation = make()
    formation.saw(6)
    formation.begin()
    assert formation.generation == 7
    formation.saw(20)
    assert formation.generation == 7, "steps of it are in flight"
    recovery.halt(1.0)
    recovery.halt(2.0)
    assert formation.generation == 22


def test_without_replicas_an_expert_node_is_waited_for() -> None:
    recovery, formation = world = make()
    recovery.lose(E1)
    halt_all(world, 0.0)
    assert not recovery.try_form(0.1)
    assert recovery.stage is Stage.WAITING
    recovery.loaded(E1, 3.0)
    assert recovery.has_halted
    assert recovery.try_form(3.0)
    assert formation.table is UNIFORM
    assert recovery.awaited == [A0, A1, E0, E1]


def test_with_replicas_an_expert_node_is_not_waited_for() -> None:
    recovery, formation = world = make(REDUNDANT)
    recovery.lose(E1)
    halt_all(world, 0.0)
    assert recovery.try_form(0.1)
    table = formation.table
    assert (table.version, table.slots) == (8, (((0, 1, 2, 3), ()),) * 2)
    table.validate()
    # Then the full table again, with a new version.
    for member in list(recovery.awaited):
        recovery.ready(member, 2, 0.2)
    recovery.loaded(E1, 5.0)
    assert recovery.stage is Stage.DRAINING
    halt_all(world, 5.1)
    assert recovery.try_form(5.2)
    back = formation.table
    assert (back.version, back.slots) == (9, REDUNDANT.slots)


def test_layers_that_may_be_local_are_so_while_their_experts_are_lost() -> None:
    recovery, formation = world = make(may_be_local=(0, 1))
    recovery.lose(E1)
    halt_all(world, 0.0)
    assert recovery.try_form(0.1)
    assert formation.table.local == (0, 1)
    assert not any(formation.table.experts_of(1))
    formation.table.validate()
    for member in list(recovery.awaited):
        recovery.ready(member, 2, 0.2)
    recovery.loaded(E1, 5.0)
    halt_all(world, 5.1)
    assert recovery.try_form(5.2)
    assert (formation.table.local, formation.table.slots) == ((), UNIFORM.slots)


def test_one_layer_that_must_not_be_local_is_waited_for() -> None:
    recovery, _ = world = make(may_be_local=(1,))
    recovery.lose(E1)
    halt_all(world, 0.0)
    assert not recovery.try_form(0.1)


def test_local_layers_do_not_care_for_lost_experts() -> None:
    local = msgspec.structs.replace(UNIFORM, slots=(((), ()),) * 2, local=(0, 1))
    recovery, formation = world = make(local)
    recovery.lose(E0)
    halt_all(world, 0.0)
    assert recovery.try_form(0.1)
    assert formation.table is local


def test_without_attention_nodes_nothing_forms() -> None:
    recovery, _ = world = make(REDUNDANT)
    recovery.lose(A0)
    recovery.lose(A1)
    halt_all(world, 0.0)
    assert not recovery.try_form(0.1)


def test_nodes_of_one_process_form_only_together() -> None:
    recovery, formation = world = make(REDUNDANT, needs_all=True)
    recovery.lose(A1)
    halt_all(world, 0.0)
    assert not recovery.try_form(0.1)
    recovery.loaded(A1, 1.0)
    assert recovery.try_form(1.0)
    assert formation.table is REDUNDANT


def test_who_does_not_react_is_overdue() -> None:
    recovery, _ = make()
    recovery.halt(0.0)
    recovery.halted(E0, 2)
    assert recovery.overdue(1.9) == []
    assert recovery.overdue(2.1) == [A0, A1, E1]
    for member in (A0, A1, E1):
        recovery.halted(member, 2)
    recovery.try_form(3.0)
    assert recovery.overdue(12.9) == []
    recovery.ready(A0, 2, 4.0)
    assert recovery.overdue(13.1) == [A1, E0, E1]


def test_waiting_expires_once_and_is_forgotten_when_the_engine_serves() -> None:
    recovery, formation = world = make()
    recovery.lose(E1)
    halt_all(world, 0.0)
    recovery.try_form(0.1)
    recovery.halt(9.0)  # another loss does not extend the wait
    assert not recovery.expires(9.9)
    assert recovery.expires(10.1)
    assert not recovery.expires(10.2)
    assert recovery.has_expired
    recovery.loaded(E1, 11.0)
    for member in list(recovery.awaited):
        recovery.halted(member, formation.generation)
    recovery.try_form(11.0)
    for member in list(recovery.awaited):
        recovery.ready(member, formation.generation, 11.5)
    assert recovery.is_serving
    assert not recovery.has_expired
    assert not recovery.expires(1000.0)


def test_a_node_that_loads_while_others_form_comes_in_with_the_next_generation() -> None:
    recovery, _ = world = make()
    recovery.lose(A1)
    halt_all(world, 0.0)
    recovery.try_form(0.1)
    recovery.loaded(A1, 0.2)
    assert A1 not in recovery.awaited
    for member in (A0, E0, E1):
        recovery.ready(member, 2, 0.3)
    assert recovery.is_serving
    assert recovery.take_late()
    assert not recovery.take_late()
    recovery.drain(0.4)
    recovery.halt(0.5)
    assert A1 in recovery.awaited


@pytest.mark.parametrize("absent", [{0}, {1}, {0, 1}])
def test_a_table_without_a_single_copy_is_none(absent: set[int]) -> None:
    assert table_without(UNIFORM, absent, current=UNIFORM) is None


def test_an_optional_node_is_not_missing_and_joins_with_its_share() -> None:
    full = ExpertTable(1, 4, (((0, 1, 2, 3), (2, 3)),) * 2)
    formation = Formation(full)
    without = table_without(full, {1}, current=full)
    assert without is not None
    formation.use_part(without)
    recovery = Recovery(
        formation,
        places=EVERYONE,
        optional=[A1, E1],
        halt_deadline_s=2.0,
        restart_deadline_s=10.0,
        needs_all=False,
    )
    assert recovery.nodes == {A0, E0}
    assert recovery.absent == [A1, E1]
    assert recovery.missing == []
    recovery.loaded(E1, 1.0)
    assert recovery.stage is Stage.DRAINING
    halt_all(World(recovery, formation), 1.1)
    assert recovery.try_form(1.2)
    assert recovery.awaited == [A0, E0, E1]
    assert (formation.table.slots, formation.table.version) == (full.slots, 3)
    recovery.lose(E0)
    assert recovery.missing == [E0]


def test_a_change_of_the_table_keeps_the_share_of_absent_nodes() -> None:
    full = ExpertTable(1, 4, (((0, 1), (2, 3), (0, 1)),))
    formation = Formation(full)
    formation.use_part(ExpertTable(2, 4, (((0, 1), (2, 3), ()),)))
    formation.use(ExpertTable(3, 4, (((0, 2), (1, 3), ()),)))
    assert formation.table.slots == (((0, 2), (1, 3), ()),)
    assert formation.full_table.slots == (((0, 2), (1, 3), (0, 1)),)
    assert formation.full_table.version == 3


def test_a_table_that_says_the_same_keeps_its_version() -> None:
    assert table_without(UNIFORM, set(), current=UNIFORM) is UNIFORM
    dense = ExpertTable(1, 0, ())
    assert table_without(dense, set(), current=dense) is dense


def test_a_replica_comes_back_when_all_its_nodes_have_loaded() -> None:
    """Attention 0 has the stages 0 and 1, of which one loads while the others form."""
    stages = [Member("stage", 0), Member("stage", 1)]
    formation = Formation(UNIFORM)
    recovery = Recovery(
        formation,
        places={*EVERYONE, *stages},
        halt_deadline_s=2.0,
        restart_deadline_s=10.0,
        needs_all=False,
        replicas=Replicas([0, 0]),
    )
    world = World(recovery, formation)
    for member in (A0, *stages):
        recovery.lose(member)
    halt_all(world, 1.0)
    assert recovery.try_form(1.1)
    assert recovery.awaited == [A1, E0, E1]
    recovery.loaded(stages[0], 1.2)
    recovery.loaded(A0, 1.3)
    for member in (A1, E0, E1):
        recovery.ready(member, formation.generation, 1.4)
    assert recovery.stage is Stage.SERVING
    assert not recovery.take_late()
    recovery.loaded(stages[1], 1.5)
    assert recovery.stage is Stage.DRAINING
    assert not recovery.absent


def test_a_node_that_is_lost_again_keeps_its_replica_out() -> None:
    stage = Member("stage", 0)
    formation = Formation(UNIFORM)
    recovery = Recovery(
        formation,
        places={*EVERYONE, stage},
        halt_deadline_s=2.0,
        restart_deadline_s=10.0,
        needs_all=False,
        replicas=Replicas([1]),
    )
    for member in (A1, stage):
        recovery.lose(member)
    recovery.loaded(A1, 1.0)
    recovery.lose(A1)
    recovery.loaded(stage, 1.1)
    assert recovery.nodes == {A0, E0, E1}
    recovery.loaded(A1, 1.2)
    assert recovery.nodes == {*EVERYONE, stage}
