"""The replica that serves a pair: each pair once, in row order, and a peak near the least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2n_comm.replicas import ReplicaChoice, replica_choice, spread_rows
from topspin.expert_table import ACTIVATION_ROWS, Replica


def peak(loads: list[int], rows: Sequence[int], speeds: list[float]) -> float:
    """Return the longest time of the nodes with rows."""
    return max(
        (load + count + ACTIVATION_ROWS) / speed
        for load, count, speed in zip(loads, rows, speeds, strict=True)
        if count
    )


def least_peak(count: int, loads: list[int], speeds: list[float]) -> float:
    every_split = product(range(count + 1), repeat=len(loads))
    return min(peak(loads, split, speeds) for split in every_split if sum(split) == count)


@given(
    count=st.integers(1, 24),
    loads=st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
@settings(max_examples=60)
def test_rows_are_split_with_the_least_peak(count: int, loads: list[int]) -> None:
    rows = spread_rows(count, loads)
    assert sum(rows) == count
    assert min(rows) >= 0
    ones = [1.0] * len(loads)
    assert peak(loads, rows, ones) == least_peak(count, loads, ones)
    assert spread_rows(count, loads, [0.25] * len(loads)) == rows


@given(
    count=st.integers(1, 24),
    nodes=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([1.0, 0.5, 0.3])), min_size=1, max_size=3
    ),
)
@settings(max_examples=60)
def test_nodes_of_unequal_speed_are_done_about_as_soon_as_possible(
    count: int, nodes: list[tuple[int, float]]
) -> None:
    loads, speeds = [load for load, _ in nodes], [speed for _, speed in nodes]
    rows = spread_rows(count, loads, speeds)
    assert sum(rows) == count
    assert min(rows) >= 0
    least = least_peak(count, loads, speeds)
    # Of a row of the slowest node: where rows end is not searched.
    assert peak(loads, rows, speeds) <= (least + 1 / min(speeds)) * (1 + 1e-9)


def test_a_fast_node_gets_more_rows() -> None:
    assert spread_rows(60, [0, 0], [1.0, 0.5]) == [43, 17]  # 51 and 2 * 25: as long
    assert spread_rows(10, [4, 0], [1.0, 0.2]) == [10, 0]  # 22 alone, the other 40 for none
    choice = ReplicaChoice(REPLICAS, num_nodes=3, speeds=(1.0, 0.5, 1.0))
    equal = ReplicaChoice(REPLICAS, num_nodes=3)
    assert choice.quotas({1: 60})[2] < equal.quotas({1: 60})[2]


def test_of_equal_nodes_the_first_gets_more() -> None:
    assert spread_rows(1, [5, 5]) == [1, 0]
    assert spread_rows(100, [0, 0, 0]) == [34, 34, 32]


REPLICAS = [
    [Replica(0, 0)],
    [Replica(0, 1), Replica(1, 0), Replica(2, 0)],
    [Replica(2, 1)],
    [Replica(1, 1), Replica(2, 2)],
]


def chosen_by(choice: ReplicaChoice, pairs: list[int]) -> list[int]:
    chosen = torch.empty(len(pairs), dtype=torch.int64)
    choice.choose(torch.tensor(pairs, dtype=torch.int64), out=chosen)
    return chosen.tolist()


@given(pairs=st.lists(st.sampled_from([0, 1, 1, 1, 2, 3, 3]), max_size=60))
@settings(max_examples=60)
def test_every_pair_gets_a_replica_of_its_expert_in_row_order(pairs: list[int]) -> None:
    choice = ReplicaChoice(REPLICAS, num_nodes=3)
    chosen = chosen_by(choice, pairs)
    expert_of = [e for e, found in enumerate(REPLICAS) for _ in found]
    assert [expert_of[replica] for replica in chosen] == pairs
    for expert in range(4):
        mine = [r for r, e in zip(chosen, pairs, strict=True) if e == expert]
        assert mine == sorted(mine)
    assert chosen == chosen_by(choice, pairs)
    assert Counter(chosen) == choice.quotas(Counter(pairs))


def test_the_busiest_expert_is_spread_first_and_around_what_is_fixed() -> None:
    choice = ReplicaChoice(REPLICAS, num_nodes=3)
    # Node 0 has 58 fixed, node 2 has 18. Expert 1 lifts nodes 1 and 2 to 47 and spares node
    # 0; expert 3 then lifts both to 57, which is less than 59 for one of them alone.
    quotas = choice.quotas({0: 50, 1: 60, 2: 10, 3: 4})
    assert quotas == {0: 50, 2: 39, 3: 21, 4: 10, 5: 2, 6: 2}


def test_without_redundancy_there_is_nothing_to_choose() -> None:
    assert replica_choice([[Replica(0, 0)], [Replica(1, 0)]], num_nodes=2) is None
