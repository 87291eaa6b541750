"""Expert counts by logical expert, and reports that do not fit the table."""

from __future__ import annotations

import pytest

from server.scheduler.experts.load import ExpertLoad
from server.scheduler.nodes.formation import NUM_RECENT_TABLES, Formation
from topspin.errors import ProtocolError
from topspin.expert_table import ExpertTable, uniform_table
from topspin.messages import ExpertCounts, pack_ints


def counts(
    index: int, *layers: list[int], version: int = 1, activations: int = 0, batches: int = 0
) -> ExpertCounts:
    """Return a report of expert node `index`."""
    packed = tuple(pack_ints(layer) for layer in layers)
    return ExpertCounts(
        index=index,
        table_version=version,
        counts=packed,
        activations=activations,
        batches=batches,
    )


def test_slots_become_logical_experts_and_replicas_add_up() -> None:
    # Layer 1 has expert 2 on both nodes, in different slots.
    table = ExpertTable(version=1, num_experts=3, slots=(((2, 0), (1,)), ((0, 2), (2, 1))))
    load = ExpertLoad(Formation(table))
    load.add(counts(0, [5, 1], [2, 3]))
    load.add(counts(1, [7], [10, 4]))
    load.add(counts(1, [1], [0, 0]))
    assert load.totals() == ((1, 8, 5), (2, 4, 13))


@pytest.mark.parametrize(
    "report",
    [
        counts(2, [1, 1]),
        counts(-1, [1, 1]),
        counts(0, [1]),
        counts(0, [1, 1], [1, 1]),
        counts(0, [1, -1]),
        counts(0, [1, 1], version=2),
        counts(0, [1, 1], activations=-1, batches=1),
        counts(0, [1, 1], activations=1, batches=-1),
        ExpertCounts(index=0, table_version=1, counts=(b"abc",)),
    ],
)
def test_a_report_that_does_not_fit_is_refused_whole(report: ExpertCounts) -> None:
    load = ExpertLoad(Formation(uniform_table(num_layers=1, num_experts=4, num_nodes=2)))
    with pytest.raises(ProtocolError):
        load.add(report)
    assert load.totals() == ((0, 0, 0, 0),)
    assert (load.activations, load.batches) == (0, 0)


def test_experts_woken_and_batches_add_up_over_nodes_and_reports() -> None:
    load = ExpertLoad(Formation(uniform_table(num_layers=1, num_experts=4, num_nodes=2)))
    load.add(counts(0, [5, 1], activations=3, batches=2))
    load.add(counts(1, [0, 2], activations=1, batches=1))
    load.add(counts(0, [1, 0], activations=1, batches=1))
    assert (load.activations, load.batches) == (5, 4)


def test_a_dense_model_has_nothing_to_count() -> None:
    load = ExpertLoad(Formation(uniform_table(num_layers=0, num_experts=0, num_nodes=1)))
    assert load.totals() == ()


def test_reports_are_read_by_the_table_that_they_name() -> None:
    old = uniform_table(num_layers=1, num_experts=4, num_nodes=2)
    new = ExpertTable(version=2, num_experts=4, slots=(((3, 2), (1, 0)),))
    formation = Formation(old)
    load = ExpertLoad(formation)
    load.add(counts(0, [5, 1]))
    load.add(counts(1, [1, 1]))
    assert load.balance() == pytest.approx(6 / 4)
    formation.use(new)
    assert load.balance() is None
    load.add(counts(0, [1, 2]))  # late, for the old table: it does not count for the new one
    assert load.balance() is None
    load.add(counts(0, [10, 20], version=2))
    load.add(counts(1, [20, 10], version=2))
    assert load.totals() == ((16, 23, 21, 11),)
    assert load.balance() == pytest.approx(1.0)
    assert load.pairs_per_expert == 71 / 4


def test_recent_pairs_weigh_double_after_a_half_life() -> None:
    load = ExpertLoad(
        Formation(uniform_table(num_layers=1, num_experts=2, num_nodes=1)), half_life_pairs=50
    )
    load.add(counts(0, [100, 0]))
    load.add(counts(0, [0, 100]))
    assert load.recent() == [pytest.approx([1 / 3, 2 / 3])]
    for _ in range(60):  # the weights are scaled down before they overflow
        load.add(counts(0, [300, 100]))
    assert load.recent() == [pytest.approx([3 / 4, 1 / 4], rel=0.05)]
    assert load.totals() == ((18100, 6100),)


def test_a_report_that_comes_very_late_counts_for_nothing() -> None:
    first = uniform_table(num_layers=1, num_experts=2, num_nodes=1)
    formation = Formation(first)
    load = ExpertLoad(formation)
    for version in range(2, NUM_RECENT_TABLES + 2):
        formation.use(ExpertTable(version, first.num_experts, first.slots))
    load.add(counts(0, [1, 0], version=1))
    assert load.totals() == ((0, 0),)
    load.add(counts(0, [1, 0], version=2))
    assert load.totals() == ((1, 0),)
