"""Log-probabilities of tokens that are known, those of prompts.

Owns the arithmetic from finished rows to log-probabilities and ranks, and their form in
StepResult. They are of the model's own distribution: no temperature, no penalty. The logits of
few rows exist at a time, since a chunk of a prompt has thousands of rows and each has a logit
per token of the vocabulary. Knows no sequence and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_nodes.step.step_inputs import Scored, ToScore
from topspin.messages import TokenLogprobs

ROWS_AT_ONCE: Final = 64


class Scores(NamedTuple):
    """The scored sequences of a step, in the form of StepResult's fields."""

    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]
    errors: dict[int, str]


NO_SCORES: Final = Scores({}, {})


def score(
    logits_of: Callable[[Tensor], Tensor], residual: Tensor, wanted: ToScore | None
) -> list[Tensor]:
    """Score the tokens that follow rows of the finished residual stream [T, H].

    `logits_of` turns rows [n, H] into fp32 logits [n, V]. Returns, on their device and for
    report(): f32[N] the log-probabilities, i64[N] how many tokens are more probable, i64[N, k] and
    f32[N, k] the best tokens and their log-probabilities; nothing if nothing is wanted.
    """
    if wanted is None:
        return []
    pieces = []
    for begin in range(0, len(wanted.rows), ROWS_AT_ONCE):
        rows, targets = (each[begin : begin + ROWS_AT_ONCE] for each in wanted[:2])
        logprobs = logits_of(residual.index_select(0, rows)).float().log_softmax(-1)
        own = logprobs.gather(1, targets[:, None])
        best = logprobs.topk(min(wanted.num_top, logprobs.shape[1]), dim=-1)
        pieces.append((own[:, 0], (logprobs > own).sum(-1), best.indices, best.values))
    return [torch.cat(each) for each in zip(*pieces, strict=True)]


def report(scored: Sequence[Scored], arrays: Sequence[np.ndarray]) -> Scores:
    """Return the log-probabilities of each of `scored`, from the arrays of score() on the host."""
    entries: dict[int, tuple[TokenLogprobs, ...]] = {}
    errors = {}
    begin = 0
    for each in scored:
        end = begin + len(each.targets)
        own, num_better, top_ids, top_logprobs = (array[begin:end] for array in arrays)
        begin = end
        if not np.isfinite(own).all():
            errors[each.seq_id] = "the model's logits are not numbers"
            continue
        entries[each.seq_id] = tuple(
            TokenLogprobs(logprob, tuple(ids), tuple(values), rank=better + 1)
            for logprob, better, ids, values in zip(
                own.tolist(),
                num_better.tolist(),
                top_ids[:, : each.num_top].tolist(),
                top_logprobs[:, : each.num_top].tolist(),
                strict=True,
            )
        )
    return Scores(entries, errors)
