"""Logits to tokens: penalties, bias, filters, and the inverse CDF of a keyed uniform.

Owns the types of sampling, and its definition `sample`, in plain torch and numpy: the oracle of
`kernels.cpu.sampling` and `kernels.triton.sampling`, slow for large vocabularies. A row's token is
a function of its logits, parameters and name (seed, choice, position) alone: no other row, batch
split or node count can change it. Knows no request and no tokenizer.

Order of processing, as in vLLM: repetition, frequency and presence penalties, logit
bias, banned and not allowed tokens, temperature, min_p, top_k, and top_p on the tokens left by
these two.
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

from kernels.philox import Purpose, uniforms

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


class AllowedTokens(NamedTuple):
    """The only tokens that G of the rows, no two the same, may choose."""

    rows: Tensor
    """i64[G]."""
    bits: Tensor
    """i32[G, ceil(V / 32)]: bit i of word w says whether token 32 w + i is allowed."""


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
    """i64[R], bit patterns of unsigned seeds."""
    choices: Tensor
    """i64[R], the index among a request's n choices."""
    positions: Tensor
    """i64[R], position of the token that is chosen, prompt included."""
    logit_bias: LogitBias | None = None
    banned: BannedTokens | None = None
    allowed: AllowedTokens | None = None
    prompts: Sequence[History] | None = None
    """The prompt's token ids of each row; needed if a row has a repetition penalty."""
    outputs: Sequence[History] | None = None
    """The ids generated so far of each row; needed if a row has any penalty."""
    is_plain: bool = False
    """No row is known to have a penalty: nobody needs to look."""

    @cached_property
    def penalised_rows(self) -> list[int]:
        """Rows with any penalty."""
        if self.is_plain:
            return []
        # Lists: numpy takes longer for a few rows.
        penalties = zip(
            self.presence_penalty.tolist(),
            self.frequency_penalty.tolist(),
            self.repetition_penalty.tolist(),
            strict=True,
        )
        return [row for row, each in enumerate(penalties) if each != (0.0, 0.0, 1.0)]

    @property
    def is_processed(self) -> bool:
        """Return whether anything but the temperature and filters changes a row's logits."""
        is_edited = (
            self.logit_bias is not None or self.banned is not None or self.allowed is not None
        )
        return is_edited or bool(self.penalised_rows)

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
    is_number: Tensor
    """bool[R]: the greatest logit is; without it the model itself is at fault."""
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
    scores = process_logits(logits, batch)
    # The greatest of a row with a NaN is NaN.
    is_number = logits.amax(-1).isfinite()
    valid = scores.amax(-1).isfinite() & is_number
    rows = scores.float().numpy(force=True)
    where = uniforms(
        *(batch.seeds.numpy().view(np.uint64), batch.choices.numpy(), batch.positions.numpy()),
        purpose=Purpose.TOKEN,
    )
    chosen_ids = [
        _choose(rows[row], row, batch, float(where[row])) if is_valid else 0
        for row, is_valid in enumerate(valid.tolist())
    ]
    tokens = torch.tensor(chosen_ids, dtype=torch.int64, device=logits.device)
    if num_top_logprobs is None:
        return SampleResult(tokens, valid, is_number, None, None, None)
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    best = logprobs.topk(min(num_top_logprobs, logits.shape[1]), dim=-1)
    return SampleResult(tokens, valid, is_number, chosen, best.indices, best.values)


def _choose(scores: NDArray[np.float32], row: int, batch: SamplingBatch, uniform: float) -> int:
    """Return the token of a row's scores f32[V], whose greatest is finite; see `sample`.

    A token is kept if its score is not below that of min_p, nor the top_k-th. Of these, it is kept
    iff the tokens above it have less than top_p of the weights together: the best always is, and
    tokens of equal score are kept or dropped together.
    """
    best, temperature = np.float64(scores.max()), np.float64(batch.temperature[row])
    if temperature < MIN_TEMPERATURE:
        return int(scores.argmax())
    with np.errstate(divide="ignore"):
        limit = np.float32(best + temperature * np.log(np.float64(batch.min_p[row])))
    top_k, top_p = int(batch.top_k[row]), float(batch.top_p[row])
    if 0 < top_k < len(scores):
        limit = max(limit, np.partition(scores, -top_k)[-top_k])
    ids = (scores >= limit).nonzero()[0]
    exponents = (scores[ids].astype(np.float64) - best) / temperature
    if top_p < 1:
        ordered = np.sort(exponents)[::-1]
        mass = np.exp(ordered).cumsum()
        num_kept = min(1 + int((mass < top_p * mass[-1]).sum()), len(mass))
        is_kept = exponents >= ordered[num_kept - 1]
        ids, exponents = ids[is_kept], exponents[is_kept]
    cdf = np.exp(exponents).cumsum()
    # The first entry above the target: a token of probability 0 does not raise the CDF.
    idx = int(np.searchsorted(cdf, cdf[-1] * uniform, side="right"))
    return int(ids[min(idx, len(cdf) - 1)])


def process_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Apply penalties, bias, bans and masks to logits [R, V].

    Gives `logits` itself if there is nothing to apply, else a new f32[R, V].
    """
    if not batch.is_processed:
        return logits
    scores = logits.to(torch.float32, copy=True)
    for row in batch.penalised_rows:
        _penalise(scores[row], row, batch)
    if batch.logit_bias is not None:
        rows, ids, values = batch.logit_bias
        scores[rows, ids] += values
    if batch.banned is not None:
        scores[batch.banned.rows, batch.banned.ids] = -math.inf
    if batch.allowed is not None:
        rows, bits = (each.to(scores.device) for each in batch.allowed)
        ids = torch.arange(scores.shape[1], device=scores.device)
        is_allowed = (bits[:, ids // 32] >> (ids % 32) & 1).bool()
        scores[rows] = scores[rows].masked_fill(~is_allowed, -math.inf)
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
