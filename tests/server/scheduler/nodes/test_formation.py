"""The generations and expert tables of an engine whose nodes come and go."""

from __future__ import annotations

import msgspec
import pytest

from server.scheduler.nodes.formation import Formation
from server.scheduler.nodes.recovery import table_without
from topspin.expert_table import ExpertTable, uniform_table

UNIFORM = uniform_table(num_layers=2, num_experts=4, num_nodes=2)
REDUNDANT = ExpertTable(7, 4, (((0, 1, 2, 3), (2, 3, 0, 1)),) * 2)


def test_a_generation_comes_after_all_that_any_node_has_been_in() -> None:
    """One that joins late may have been in those of an earlier scheduler."""
    formation = Formation(UNIFORM)
    formation.saw(6)
    formation.begin()
    assert formation.generation == 7
    formation.saw(20)
    assert formation.generation == 7, "steps of it are in flight"
    formation.begin_generation()
    formation.begin_generation()
    assert formation.generation == 22


@pytest.mark.parametrize(
    ("full", "may_be_local", "slots"),
    [
        (REDUNDANT, (), (((0, 1, 2, 3), ()),) * 2),
        (UNIFORM, (0, 1), (((0, 1), ()),) * 2),
        (UNIFORM, (1,), None),
        (UNIFORM, (), None),
    ],
)
def test_a_table_without_a_node_lacks_no_expert_or_is_none(
    full: ExpertTable,
    may_be_local: tuple[int, ...],
    slots: tuple[tuple[tuple[int, ...], ...], ...] | None,
) -> None:
    found = table_without(full, {1}, current=full, may_be_local=may_be_local)
    assert (found is None) == (slots is None)
    if found is not None:
        found.validate()
        assert (found.slots, found.local) == (slots, may_be_local)
        assert found.version == full.version + 1
        again = table_without(full, {1}, current=found, may_be_local=may_be_local)
        assert again is found, "it says the same"
        back = table_without(full, set(), current=found, may_be_local=may_be_local)
        assert back == msgspec.structs.replace(full, version=full.version + 2)


def test_a_change_of_the_table_keeps_the_share_of_absent_nodes() -> None:
    full = ExpertTable(1, 4, (((0, 1), (2, 3), (0, 1)),))
    formation = Formation(full)
    formation.use_part(ExpertTable(2, 4, (((0, 1), (2, 3), ()),)))
    formation.use(ExpertTable(3, 4, (((0, 2), (1, 3), ()),)))
    assert formation.table.slots == (((0, 2), (1, 3), ()),)
    assert formation.full_table.slots == (((0, 2), (1, 3), (0, 1)),)
    assert formation.full_table.version == 3
