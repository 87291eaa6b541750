"""Which steps are recorded; that recorded ones are right is for tests/identity."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from attention_nodes.step.recorded_steps import MAX_SEQUENCE_ROWS, key_of
from attention_nodes.step.step_inputs import Indexed
from kernels.contracts import Retrieval
from kernels.recordings import MAX_RECORDED_ROWS


def indexed(counts: list[int], num_sampled: int, *, retrieval: Retrieval | None = None) -> Indexed:
    """Return a micro-batch of sequences with so many rows."""
    fields: dict[str, Any] = dict.fromkeys(
        ("positions", "prompt_lens", "kv_slots", "query_start", "context_lens", "block_tables")
    )
    fields |= {"tree_mask": np.tri(sum(counts), dtype=bool), "tree_lens": None}
    fields["retrieval"] = retrieval
    fields |= {"counts": np.array(counts), "tokens": np.zeros(sum(counts), dtype=np.int64)}
    fields["sample_rows"] = np.arange(num_sampled)
    return cast("Indexed", type("_Indexed", (), fields)())


def test_a_step_is_recorded_by_its_rows_whatever_sequences_have_them() -> None:
    plain = (False, False)
    assert key_of([indexed([1, 8, 3], 5), indexed([2], 1)]) == ((12, 2), plain, 6)
    assert key_of([indexed([8, 1, 1, 2], 5), indexed([1, 1], 1)]) == ((12, 2), plain, 6)
    assert key_of([indexed([], 0), indexed([1], 1)]) == ((0, 1), plain, 1)


@pytest.mark.parametrize(
    "counts", [[], [MAX_SEQUENCE_ROWS + 1], [1] * (MAX_RECORDED_ROWS + 1)], ids=len
)
def test_long_pieces_and_large_steps_are_not(counts: list[int]) -> None:
    assert key_of([indexed(counts, len(counts))]) is None


def test_steps_with_retrieval_are_recorded_apart() -> None:
    nothing = torch.zeros(0, dtype=torch.int32)
    retrieval = Retrieval(nothing, nothing, nothing, nothing, nothing, nothing, 16)
    key = key_of([indexed([1], 1), indexed([1], 1, retrieval=retrieval)])
    assert key == ((1, 1), (False, True), 2)
