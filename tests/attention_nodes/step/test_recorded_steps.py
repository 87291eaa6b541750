"""The choice of steps that are recorded; that recorded ones are right is for tests/identity."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention_nodes.step.recorded_steps import MAX_SEQUENCE_ROWS, key_of
from attention_nodes.step.step_inputs import NO_SLICES, Slices
from kernels.contracts import Retrieval
from kernels.recordings import MAX_RECORDED_ROWS


def slices(counts: list[int], num_sampled: int, *, retrieval: Retrieval | None = None) -> Slices:
    """Return a micro-batch of sequences with so many rows."""
    return NO_SLICES._replace(
        counts=np.array(counts),
        tokens=np.zeros(sum(counts), dtype=np.int64),
        sample_rows=np.arange(num_sampled),
        tree_mask=np.tri(sum(counts), dtype=bool),
        retrieval=retrieval,
    )


def test_a_step_is_recorded_by_its_rows_whatever_sequences_have_them() -> None:
    plain = (False, False)
    assert key_of([slices([1, 8, 3], 5), slices([2], 1)]) == ((12, 2), plain, plain, 6)
    assert key_of([slices([8, 1, 1, 2], 5), slices([1, 1], 1)]) == ((12, 2), plain, plain, 6)
    assert key_of([slices([], 0), slices([1], 1)]) == ((0, 1), plain, plain, 1)


def test_steps_with_rows_that_attend_in_groups_are_recorded_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attention_nodes.step.recorded_steps.SINGLE_ROWS", 8)
    plain, joins = (False, False), (False, True)
    assert key_of([slices([8], 1), slices([9, 4], 2)]) == ((8, 13), plain, joins, 3)
    assert key_of([slices([8], 1), slices([1, 12], 2)]) == ((8, 13), plain, joins, 3)
    assert key_of([slices([MAX_SEQUENCE_ROWS], 1)]) == ((32,), (False,), (True,), 1)


@pytest.mark.parametrize(
    "counts", [[], [MAX_SEQUENCE_ROWS + 1], [1] * (MAX_RECORDED_ROWS + 1)], ids=len
)
def test_long_pieces_and_large_steps_are_not(counts: list[int]) -> None:
    assert key_of([slices(counts, len(counts))]) is None


def test_steps_with_retrieval_are_recorded_apart() -> None:
    nothing = torch.zeros(0, dtype=torch.int32)
    retrieval = Retrieval(nothing, nothing, nothing, nothing, nothing, nothing, 16)
    key = key_of([slices([1], 1), slices([1], 1, retrieval=retrieval)])
    assert key == ((1, 1), (False, True), (False, False), 2)
