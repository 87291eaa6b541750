"""Logits to tokens: penalties, bias, filters, and the inverse CDF of a keyed uniform.

A row's token is a function of its own logits, parameters and name (seed, choice,
position) alone: rows are processed one by one, so no other row, batch split or node
count can change it. Knows no request and no tokenizer. Called by the attention node's
last stage, on the device where the logits are.

Order of processing, as in vLLM: repetition, frequency and presence penalties, logit
bias, banned tokens, temperature, min_p, top_k, top_p on what the former two left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.philox import Purpose, uniforms

History = Sequence[int] | Tensor

# Below it a row is greedy: fp32 logits a few ulp apart are all that it could tell apart.
MIN_TEMPERATURE: Final = 1e-5


class LogitBias(NamedTuple):
    """Values added to single logits; a (row, id) pair may occur once."""

    rows: Tensor
    """i64[M]."""
    ids: Tensor
    """i64[M]."""
    values: Tensor
    """f32[M]."""


class BannedTokens(NamedTuple):
    """Tokens that must not be chosen (stop tokens before min_tokens is reached)."""

    rows: Tensor
    """i64[M]."""
    ids: Tensor
    """i64[M]."""


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """How each of R rows chooses its token; ranges have been checked by the scheduler.

    Neutral values: temperature 1, top_k 0, top_p 1, min_p 0, presence and frequency
    penalty 0, repetition penalty 1. A temperature below MIN_TEMPERATURE is greedy. Token ids
    are below V.
    """

    temperature: Tensor
    """f32[R]."""
    top_k: Tensor
    """i64[R]."""
    top_p: Tensor
    """f32[R]."""
    min_p: Tensor
    """f32[R]."""
    presence_penalty: Tensor
    """f32[R]."""
    frequency_penalty: Tensor
    """f32[R]."""
    repetition_penalty: Tensor
    """f32[R]."""
    seeds: Tensor
    """i64[R], bit patterns of unsigned seeds (`kernels.philox.as_signed`)."""
    choices: Tensor
    """i64[R], which of a request's n choices."""
    positions: Tensor
    """i64[R], position of the token that is chosen, prompt included."""
    logit_bias: LogitBias | None = None
    banned: BannedTokens | None = None
    prompts: Sequence[History] | None = None
    """Per row its prompt's token ids; needed if a row has a repetition penalty."""
    outputs: Sequence[History] | None = None
    """Per row the ids generated so far; needed if a row has any penalty."""

    @cached_property
    def penalised_rows(self) -> list[int]:
        """Rows with any penalty."""
        some = (self.presence_penalty != 0) | (self.frequency_penalty != 0)
        some |= self.repetition_penalty != 1
        rows: list[int] = some.nonzero()[:, 0].tolist()
        return rows

    @cached_property
    def drawn_rows(self) -> list[int]:
        """Rows that are not greedy."""
        rows: list[int] = (self.temperature >= MIN_TEMPERATURE).nonzero()[:, 0].tolist()
        return rows


class SampleResult(NamedTuple):
    """The tokens, and log-probabilities if asked for.

    Log-probabilities are natural logarithms of the model's own distribution: of the
    logits as they came, before any processing.
    """

    tokens: Tensor
    """i64[R]; below V in invalid rows too."""
    valid: Tensor
    """bool[R]: the greatest logit and the greatest processed score are finite numbers."""
    logprobs: Tensor | None
    """f32[R], of the chosen tokens."""
    top_ids: Tensor | None
    """i64[R, n], the most probable tokens, best first."""
    top_logprobs: Tensor | None
    """f32[R, n], of top_ids."""


def sample(
    logits: Tensor, batch: SamplingBatch, *, num_top_logprobs: int | None = None
) -> SampleResult:
    """Choose one token per row of logits [R, V].

    `num_top_logprobs` None: no log-probabilities; n >= 0: the chosen token's and those of
    the n best. Logits are not changed. A row is invalid, and no other suffers, if there is a
    NaN or a +inf among its logits or its processed scores, or if all of them are -inf.
    """
    tokens, valid = _choose(logits, batch)
    if num_top_logprobs is None:
        return SampleResult(tokens, valid, None, None, None)
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    best = logprobs.topk(min(num_top_logprobs, logits.shape[1]), dim=-1)
    return SampleResult(tokens, valid, chosen, best.indices, best.values)


class _Choice(NamedTuple):
    tokens: Tensor
    valid: Tensor


def _choose(logits: Tensor, batch: SamplingBatch) -> _Choice:
    processed = process_logits(logits, batch)
    drawn = batch.drawn_rows
    if len(drawn) < logits.shape[0]:
        # Of equal logits the lowest id wins. (argmax of bf16 takes five times as long.)
        tokens = processed.float().argmax(-1)
        # The greatest of a row with a NaN is NaN.
        valid = processed.gather(1, tokens[:, None])[:, 0].isfinite()
    else:
        tokens = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
        valid = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    if processed is not logits:
        # A ban may hide what the model got wrong.
        valid &= logits.amax(-1).isfinite()
    if drawn:
        _draw(processed, batch, _Choice(tokens, valid))
    return _Choice(tokens, valid)


def _draw(processed: Tensor, batch: SamplingBatch, choice: _Choice) -> None:
    """Overwrite the entries of the rows that are not greedy in `choice`."""
    draws = uniforms(
        batch.seeds.numpy(force=True).view(np.uint64),
        batch.choices.numpy(force=True),
        batch.positions.numpy(force=True),
        purpose=Purpose.TOKEN,
    ).tolist()
    settings = zip(
        batch.temperature.tolist(),
        batch.top_k.tolist(),
        batch.top_p.tolist(),
        batch.min_p.tolist(),
        strict=True,
    )
    is_drawn = set(batch.drawn_rows)
    for row, (temperature, top_k, top_p, min_p) in enumerate(settings):
        if row not in is_drawn:
            continue
        scores = processed[row].float()
        best = float(scores.max())
        if not math.isfinite(best):
            choice.tokens[row], choice.valid[row] = 0, False
            continue
        lowest = _lowest_kept(scores, temperature, best=best, top_k=top_k, top_p=top_p, min_p=min_p)
        choice.tokens[row] = _invert(
            scores, temperature, best=best, lowest=lowest, uniform=draws[row]
        )


def process_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Apply penalties, bias and bans to logits [R, V].

    Gives `logits` itself if there is nothing to apply, else a new f32[R, V].
    """
    if not batch.penalised_rows and batch.logit_bias is None and batch.banned is None:
        return logits
    scores = logits.to(torch.float32, copy=True)
    for row in batch.penalised_rows:
        _penalise(scores[row], row, batch)
    if batch.logit_bias is not None:
        rows, ids, values = batch.logit_bias
        scores[rows, ids] += values
    if batch.banned is not None:
        scores[batch.banned.rows, batch.banned.ids] = -math.inf
    return scores


def _penalise(scores: Tensor, row: int, batch: SamplingBatch) -> None:
    """Apply one row's penalties to its scores f32[V] in place."""
    assert batch.outputs is not None, "penalties need the outputs"
    output = torch.as_tensor(batch.outputs[row], dtype=torch.int64, device=scores.device)
    repetition = float(batch.repetition_penalty[row])
    if repetition != 1:
        assert batch.prompts is not None, "a repetition penalty needs the prompts"
        prompt = torch.as_tensor(batch.prompts[row], dtype=torch.int64, device=scores.device)
        seen = torch.unique(torch.cat((prompt, output)))
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / repetition, values * repetition)
    ids, counts = torch.unique(output, return_counts=True)
    scores[ids] -= batch.frequency_penalty[row] * counts
    scores[ids] -= batch.presence_penalty[row]


def _lowest_kept(
    scores: Tensor, temperature: float, *, best: float, top_k: int, top_p: float, min_p: float
) -> float | None:
    """Give the lowest score that the filters keep, None if they keep all.

    Every filter keeps an upper part of the scores f32[V], so one number describes them
    all, and tokens of equal score stay or go together. `best` is the greatest score, finite.
    """
    lowest: float | None = None
    if min_p > 0:
        lowest = best + temperature * math.log(min_p)
    if 0 < top_k < scores.numel():
        kth = float(scores.topk(top_k).values[-1])
        lowest = kth if lowest is None else max(lowest, kth)
    if top_p < 1:
        kept = scores if lowest is None else scores[scores >= lowest]
        lowest = _nucleus(kept, temperature, top_p)
    return lowest


def _nucleus(scores: Tensor, temperature: float, top_p: float) -> float:
    """Give the lowest score of the smallest upper part of probability >= top_p.

    A token stays iff the tokens above it have less than top_p together; the best always
    stays. Probabilities are renormalised over the given scores.
    """
    ordered = _descending(scores)
    wide = ordered.double()
    mass = torch.exp((wide - wide[0]) / temperature).cumsum(0)
    num_kept = 1 + int((mass < top_p * mass[-1]).sum())
    return float(ordered[num_kept - 1])


def _descending(scores: Tensor) -> Tensor:
    """Sort scores f32[V], greatest first."""
    if scores.device.type == "cpu":
        # numpy's vectorised sort of 50,000 floats takes 0.1 ms, torch's 3 ms.
        return torch.from_numpy(np.sort(scores.numpy())).flip(0)
    return scores.sort(descending=True).values


def _invert(
    scores: Tensor, temperature: float, *, best: float, lowest: float | None, uniform: float
) -> int:
    """Give the token at which the CDF, over ascending token ids in fp64, passes uniform."""
    ids = None if lowest is None else (scores >= lowest).nonzero()[:, 0]
    values = (scores if ids is None else scores[ids]).double()
    cdf = torch.exp((values - best) / temperature).cumsum(0)
    # The first entry above the target: a token of probability 0 raises nothing.
    idx = int(torch.searchsorted(cdf, cdf[-1:] * uniform, right=True))
    assert 0 <= idx < values.numel(), "the scores have no distribution"
    return idx if ids is None else int(ids[idx])
