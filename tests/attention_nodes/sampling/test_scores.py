"""Scores against torch's log_softmax, in pieces, and rows that are no numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_nodes.sampling.sampler import ROWS_AT_ONCE, report, score
from attention_nodes.step.step_inputs import Scored, ToScore

VOCAB, HIDDEN, ROWS = 300, 8, 2 * ROWS_AT_ONCE + 5


def test_few_logits_exist_at_a_time_and_each_token_has_its_rank() -> None:
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(ROWS + 10, HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    rows = torch.randperm(ROWS + 10, generator=generator)[:ROWS]
    targets = torch.randint(VOCAB, (ROWS,), generator=generator)
    sizes = []

    def logits_of(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return hidden @ head.T

    arrays = [each.numpy() for each in score(logits_of, residual, ToScore(rows, targets, 4))]
    assert sizes == [ROWS_AT_ONCE, ROWS_AT_ONCE, 5]
    ids = targets.numpy()
    scored = [Scored(7, 0, ids[:100], 4), Scored(3, 100, ids[100:], 0)]
    found = report(scored, arrays)
    assert found.errors == {}
    expected = (residual[rows] @ head.T).log_softmax(-1)
    for row, entry in enumerate((*found.prompt_logprobs[7], *found.prompt_logprobs[3])):
        ordered = expected[row].argsort(descending=True).tolist()
        assert ordered[entry.rank - 1] == targets[row]
        assert entry.logprob == pytest.approx(expected[row, targets[row]].item(), abs=1e-5)
        assert list(entry.top_ids) == (ordered[:4] if row < 100 else [])
        best = expected[row, list(entry.top_ids)]
        assert list(entry.top_logprobs) == pytest.approx(best.tolist(), abs=1e-5)


def test_a_sequence_without_numbers_fails_alone() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 5] = torch.nan
    wanted = ToScore(torch.arange(3), torch.tensor([1, 2, 3]), 0)
    arrays = [each.numpy() for each in score(lambda rows: rows, logits, wanted)]
    ids = np.array([1, 2, 3])
    found = report([Scored(1, 0, ids[:2], 0), Scored(2, 2, ids[2:], 0)], arrays)
    assert found.errors == {1: "the model's logits are not numbers"}
    assert sorted(found.prompt_logprobs) == [2]
