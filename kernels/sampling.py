"""Logits to tokens: penalties, bias, filters, and the inverse CDF of a keyed uniform.

A row's token is a function of its logits, parameters and name (seed, choice,
position) alone: rows are processed one by one, so no other row, batch split or node
count can change it. Knows no request and no tokenizer. Called by the attention node's
last stage, on the device where the logits are.

Order of processing, as in vLLM: repetition, frequency and presence penalties, logit
bias, banned tokens, temperature, min_p, top_k, and top_p on the tokens left by these two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.philox import Purpose

History = Sequence[int] | Tensor

# Below it a row is greedy: sampling would differ only for fp32 logits a few ulp apart.
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
    """The sampling settings of R rows, on the host; the scheduler has checked their ranges.

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
    """i64[R], the index among a request's n choices."""
    positions: Tensor
    """i64[R], position of the token that is chosen, prompt included."""
    logit_bias: LogitBias | None = None
    banned: BannedTokens | None = None
    prompts: Sequence[History] | None = None
    """The prompt's token ids of each row; needed if a row has a repetition penalty."""
    outputs: Sequence[History] | None = None
    """The ids generated so far of each row; needed if a row has any penalty."""

    @cached_property
    def penalised_rows(self) -> list[int]:
        """Rows with any penalty."""
        some = self.presence_penalty.numpy() != 0
        some |= self.frequency_penalty.numpy() != 0
        some |= self.repetition_penalty.numpy() != 1
        rows: list[int] = some.nonzero()[0].tolist()
        return rows

    @cached_property
    def drawn_rows(self) -> list[int]:
        """Rows that are not greedy."""
        rows: list[int] = (self.temperature.numpy() >= MIN_TEMPERATURE).nonzero()[0].tolist()
        return rows


class SampleResult(NamedTuple):
    """The tokens, and log-probabilities if asked for.

    Log-probabilities are natural logarithms of the model's distribution: that of the logits
    before any processing.
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

    `num_top_logprobs` None: no log-probabilities; n >= 0: those of the chosen token and of the n
    best. Logits are not changed. A row is invalid, without effect on others, if its logits or
    processed scores contain a NaN or a +inf, or are all -inf.
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
    tokens, best = _choose_from(processed.float().cpu().contiguous(), batch)
    # The greatest of a row with a NaN is NaN.
    is_valid = np.isfinite(best)
    if processed is not logits:
        # A ban may hide an invalid logit of the model.
        is_valid &= logits.amax(-1).isfinite().numpy(force=True)
    choice = _Choice(torch.from_numpy(tokens), torch.from_numpy(is_valid))
    return _Choice(*(each.to(logits.device) for each in choice))


def _choose_from(
    scores: Tensor, batch: SamplingBatch
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the tokens of rows of processed scores f32[R, V], and the greatest scores, f64[R]."""
    # Imported here: the GPU's sampling uses this module's types and must not need numba.
    from kernels.cpu.compiled import philox
    from kernels.cpu.compiled.sampling import choose_rows

    if batch.drawn_rows:
        draws = philox.uniforms(batch.seeds, batch.choices, batch.positions, purpose=Purpose.TOKEN)
    else:
        draws = torch.zeros(len(scores), dtype=torch.float64)
    chosen = choose_rows(
        scores,
        temperature=batch.temperature,
        top_k=batch.top_k,
        min_p=batch.min_p,
        top_p=batch.top_p,
        uniforms=draws,
    )
    tokens = chosen.tokens.astype(np.int64)
    for row in chosen.counts.nonzero()[0].tolist():
        ids = chosen.ids[row, : int(chosen.counts[row])]
        tokens[row] = _draw_from_nucleus(
            ids,
            (scores[row].numpy()[ids].astype(np.float64) - chosen.best[row])
            / float(batch.temperature[row]),
            rest=chosen.rest[row],
            top_p=float(batch.top_p[row]),
            uniform=float(draws[row]),
        )
    return tokens, chosen.best


def _draw_from_nucleus(
    ids: np.ndarray, exponents: np.ndarray, *, rest: float, top_p: float, uniform: float
) -> int:
    """Draw from the nucleus, the smallest top part of probability >= top_p, by inversion in fp64.

    ids i32[C], ascending, contain the nucleus and have the weights exp(exponents f64[C]); all
    other tokens weigh `rest` together. A token is kept iff the tokens above it have less than
    top_p together; the best is always kept, and tokens of equal score are kept or dropped together.
    """
    ordered = np.sort(exponents)[::-1]
    mass = np.exp(ordered).cumsum()
    num_kept = min(1 + int((mass < top_p * (mass[-1] + rest)).sum()), len(mass))
    kept = exponents >= ordered[num_kept - 1]
    cdf = np.exp(exponents[kept]).cumsum()
    # The first entry above the target: a token of probability 0 does not raise the CDF.
    idx = int(np.searchsorted(cdf, cdf[-1] * uniform, side="right"))
    return int(ids[kept][min(idx, len(cdf) - 1)])


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
