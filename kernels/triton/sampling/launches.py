"""Sampling on a GPU: a batch's data on the device, and the launches from logits to tokens.

`plan_sampling` gathers a batch on the host and copies it to the device at once; `draw` then
launches kernels that depend on the plan's `kind` and sizes only, and waits for nothing, so a
CUDA graph of one kind can be replayed after the plan's buffer has been written again. `sample`
is both, with the signature of `kernels.sampling.sample` and its order of processing.

Tokens are those of the inverse CDF in fp64 over ascending ids, with bit-identical Philox
uniforms; greedy tokens, penalties and validity are exactly the CPU's. A drawn token can differ
from another fp64 implementation's only if the uniform (or the nucleus's bound) is as near to a
border of the CDF as the rounding of the sums, about V * 2**-53 of the whole:
less than once in 10**9 draws of 150,000 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.sampling import AllowedTokens, BannedTokens, LogitBias, SampleResult, SamplingBatch
from kernels.triton.sampling.filters import BINS, PASSES, finish_search, tally_digit
from kernels.triton.sampling.kernels import (
    count_history,
    invert_row,
    mask_block,
    penalise_block,
    settle_row,
    survey_split,
    weigh_split,
)

SPLIT_SIZE: Final = 8192
"""Scores of a row per program."""
BLOCK: Final = 1024
TALLY_BLOCK: Final = 256
HISTORY_BLOCK: Final = 1024
NUM_INTS: Final = 6
NUM_REALS: Final = 6


class SamplingKind(NamedTuple):
    """The kernels that a batch needs; a CUDA graph depends on this and on sizes only."""

    drawn: bool
    top_k: bool
    top_p: bool
    penalties: bool


class SamplingPlan(NamedTuple):
    """A batch of R rows on the device. Filters and draws skip rows that do not need them."""

    kind: SamplingKind
    ints: Tensor
    """i64[6, R]: seed, choice, position, top_k (0: none), drawn or greedy, history (-1: none)."""
    reals: Tensor
    """f64[6, R]: temperature, top_p, min_p, presence, frequency, repetition."""
    histories: Tensor
    """i64, the tokens of all histories, prompt before output."""
    bounds: Tensor
    """i64[2n + 1]: where the n histories begin and the last ends, then lengths of prompts."""
    longest_history: int
    logit_bias: LogitBias | None
    banned: BannedTokens | None
    allowed: AllowedTokens | None

    @property
    def num_histories(self) -> int:
        """The number of rows with a penalty."""
        return self.bounds.numel() // 2


def plan_sampling(batch: SamplingBatch, vocab: int, device: torch.device) -> SamplingPlan:
    """Copy a batch, whose tensors are on the host, to the device in one transfer.

    `vocab` is the number of logits in a row.
    """
    num_rows = len(batch.temperature)
    top_k = torch.where(batch.top_k < vocab, batch.top_k, 0).clamp(min=0)
    is_drawn = torch.zeros(num_rows, dtype=torch.int64)
    is_drawn[batch.drawn_rows] = 1
    history = torch.full((num_rows,), -1, dtype=torch.int64)
    history[batch.penalised_rows] = torch.arange(len(batch.penalised_rows))
    ints = torch.stack((batch.seeds, batch.choices, batch.positions, top_k, is_drawn, history))
    reals = torch.stack(
        (
            batch.temperature,
            batch.top_p,
            batch.min_p,
            batch.presence_penalty,
            batch.frequency_penalty,
            batch.repetition_penalty,
        )
    ).double()
    tokens, bounds = _histories(batch)
    bias, banned, allowed = batch.logit_bias, batch.banned, batch.allowed
    parts = [ints.flatten(), reals.flatten().view(torch.int64), bounds, tokens]
    parts += [] if bias is None else [bias.rows, bias.ids, _as_words(bias.values)]
    parts += [] if banned is None else [banned.rows, banned.ids]
    parts += [] if allowed is None else [allowed.rows, _as_words(allowed.bits.flatten())]
    moved = _move(parts, device)
    at = 4
    if bias is not None:
        rows, ids, values = moved[at : at + 3]
        bias = LogitBias(rows, ids, values.view(torch.float32)[: len(rows)])
        at += 3
    if banned is not None:
        banned = BannedTokens(*moved[at : at + 2])
        at += 2
    if allowed is not None:
        rows, words = moved[at : at + 2]
        bits = words.view(torch.int32)[: allowed.bits.numel()]
        allowed = AllowedTokens(rows, bits.view(allowed.bits.shape))
    drawn = is_drawn > 0
    return SamplingPlan(
        SamplingKind(
            drawn=bool(drawn.any()),
            top_k=bool((drawn & (top_k > 0)).any()),
            top_p=bool((drawn & (batch.top_p < 1)).any()),
            penalties=bool(batch.penalised_rows),
        ),
        moved[0].view(NUM_INTS, num_rows),
        moved[1].view(torch.float64).view(NUM_REALS, num_rows),
        moved[3],
        moved[2],
        int(bounds[: bounds.numel() // 2 + 1].diff().max()) if bounds.numel() > 1 else 0,
        bias,
        banned,
        allowed,
    )


def _as_words(values: Tensor) -> Tensor:
    """Return f32 or i32 values packed in pairs as i64, padded with a 0 if their number is odd."""
    return torch.nn.functional.pad(values, (0, len(values) % 2)).view(torch.int64)


def _move(parts: list[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Enqueue one copy of parts i64 to the device; return them there."""
    joined = torch.cat(parts)
    if device.type == "cuda":
        joined = joined.pin_memory()
    return torch.split(joined.to(device, non_blocking=True), [part.numel() for part in parts])


def _histories(batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Return the tokens of the penalised rows' histories, and `SamplingPlan.bounds`."""
    prompts: list[Tensor] = []
    lengths: list[int] = []
    tokens: list[Tensor] = []
    for row in batch.penalised_rows:
        assert batch.outputs is not None, "penalties need the outputs"
        prompt: Sequence[int] | Tensor = ()
        if float(batch.repetition_penalty[row]) != 1:
            assert batch.prompts is not None, "a repetition penalty needs the prompts"
            prompt = batch.prompts[row]
        both = [torch.as_tensor(part, dtype=torch.int64) for part in (prompt, batch.outputs[row])]
        prompts.append(both[0])
        lengths.append(both[0].numel() + both[1].numel())
        tokens += both
    bounds = [*accumulate(lengths, initial=0), *(prompt.numel() for prompt in prompts)]
    joined = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)
    return joined, torch.tensor(bounds, dtype=torch.int64)


def sample(
    logits: Tensor, batch: SamplingBatch, *, num_top_logprobs: int | None = None
) -> SampleResult:
    """Choose one token per row of logits [R, V]; see `kernels.sampling.sample`."""
    plan = plan_sampling(batch, logits.shape[1], logits.device)
    return draw(logits, plan, num_top_logprobs=num_top_logprobs)


def draw(
    logits: Tensor, plan: SamplingPlan, *, num_top_logprobs: int | None = None
) -> SampleResult:
    """Choose one token per row of logits [R, V] as planned; logits are not changed.

    Raises ValueError for logits that do not fit the plan.
    """
    num_rows, vocab = logits.shape
    if plan.ints.shape[1] != num_rows:
        raise ValueError(f"{num_rows} rows of logits, {plan.ints.shape[1]} in the plan")
    if logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(1) != 1:
        raise ValueError(f"logits of {logits.dtype}, strides {logits.stride()}")
    rows = _SampledRows(logits, processed(logits, plan), plan)
    if num_rows:
        rows.survey(with_norm=num_top_logprobs is not None)
        if plan.kind.drawn:
            if plan.kind.top_k:
                rows.search(by_mass=False)
            if plan.kind.top_p:
                rows.search(by_mass=True)
            rows.invert()
    # Without processing only the model itself can be at fault.
    is_number = rows.valid if rows.is_raw else logits.amax(-1).isfinite()
    if num_top_logprobs is None:
        return SampleResult(rows.tokens, rows.valid, is_number, None, None, None)
    chosen = logits.gather(1, rows.tokens[:, None])[:, 0].float() - rows.norm
    best = logits.float().topk(min(num_top_logprobs, vocab), dim=-1)
    top_logprobs = best.values - rows.norm[:, None]
    return SampleResult(rows.tokens, rows.valid, is_number, chosen, best.indices, top_logprobs)


def processed(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """Return logits [R, V] after penalties, bias, bans and masks: f32, or unchanged without any."""
    bias, banned, allowed = plan.logit_bias, plan.banned, plan.allowed
    if not plan.kind.penalties and bias is None and banned is None and allowed is None:
        return logits
    num_rows, vocab = logits.shape
    scores = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
    count, device = plan.num_histories, logits.device
    seen = torch.zeros(count, vocab, dtype=torch.int32, device=device)
    if count and plan.longest_history:
        count_history[(count, triton.cdiv(plan.longest_history, HISTORY_BLOCK))](
            plan.histories, plan.bounds, seen, vocab, count, BLOCK=HISTORY_BLOCK, num_warps=4
        )
    penalise_block[(num_rows, triton.cdiv(vocab, BLOCK))](
        logits,
        scores,
        seen,
        plan.ints,
        plan.reals,
        num_rows,
        vocab,
        logits.stride(0),
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    if bias is not None:
        scores[bias.rows, bias.ids] += bias.values
    if banned is not None:
        scores[banned.rows, banned.ids] = float("-inf")
    if allowed is not None:
        num_masks, num_words = allowed.bits.shape
        mask_block[(num_masks, triton.cdiv(vocab, BLOCK))](
            scores, allowed.rows, allowed.bits, vocab, num_words, BLOCK=BLOCK, num_warps=4
        )
    return scores


class _SampledRows:
    """The scores of a batch, and the results of its kernels for each row."""

    def __init__(self, logits: Tensor, scores: Tensor, plan: SamplingPlan) -> None:
        self._logits, self._scores, self._plan = logits, scores, plan
        self._num_rows, self._vocab = logits.shape
        self._num_splits = triton.cdiv(self._vocab, SPLIT_SIZE)
        self._splits_pad = triton.next_power_of_2(self._num_splits)
        self.tokens = self._empty(torch.int64, self._num_rows)
        self.valid = self._empty(torch.bool, self._num_rows)
        self.norm = self._empty(torch.float32, self._num_rows)
        self._best = self._empty(torch.float32, self._num_rows)
        self._lowest = self._empty(torch.float32, self._num_rows)
        self._uniforms = self._empty(torch.float64, self._num_rows)

    @property
    def is_raw(self) -> bool:
        """Return whether the scores are the logits."""
        return self._scores is self._logits

    def _empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._logits.device)

    @property
    def _grid(self) -> tuple[int, int]:
        return self._num_rows, self._num_splits

    @property
    def _state(self) -> tuple[Tensor, ...]:
        return self._plan.ints, self._plan.reals, self.valid, self._best, self._lowest

    def _survey_splits(self, scores: Tensor, *, with_sum: bool) -> tuple[Tensor, Tensor, Tensor]:
        maxima, sums = (self._empty(torch.float32, *self._grid) for _ in range(2))
        places = self._empty(torch.int32, *self._grid)
        survey_split[self._grid](
            scores,
            maxima,
            places,
            sums,
            self._vocab,
            scores.stride(0),
            SPLIT_SIZE,
            SUM=with_sum,
            BLOCK=BLOCK,
            num_warps=4,
        )
        return maxima, places, sums

    def survey(self, *, with_norm: bool) -> None:
        """Find each row's best token, whether it is valid, and its uniform."""
        raw = self._survey_splits(self._logits, with_sum=with_norm)
        own = raw
        if not self.is_raw:
            own = self._survey_splits(self._scores, with_sum=False)
        settle_row[(self._num_rows,)](
            own[0],
            own[1],
            raw[0],
            raw[2],
            self._plan.ints,
            self._plan.reals,
            self._best,
            self._lowest,
            self._uniforms,
            self.tokens,
            self.valid,
            self.norm,
            self._num_rows,
            self._num_splits,
            NORM=with_norm,
            S_PAD=self._splits_pad,
            num_warps=1,
        )

    def search(self, *, by_mass: bool) -> None:
        """Raise the lowest kept scores to those of top_p, if `by_mass`, or of top_k."""
        tallies = self._empty(torch.float64, 2, *self._grid, BINS.value)
        prefixes = self._empty(torch.int64, 2, self._num_rows)
        sums = self._empty(torch.float64, 2, 2, self._num_rows)
        options: dict[str, Any] = {"MASS": by_mass, "S_PAD": self._splits_pad, "num_warps": 4}
        for step in range(PASSES.value):
            tally_digit[self._grid](
                self._scores,
                *self._state,
                tallies,
                prefixes,
                sums,
                step,
                self._num_rows,
                self._vocab,
                self._scores.stride(0),
                SPLIT_SIZE,
                BLOCK=TALLY_BLOCK,
                **options,
            )
        finish_search[(self._num_rows,)](
            self._plan.ints,
            self._plan.reals,
            self.valid,
            self._lowest,
            tallies,
            prefixes,
            sums,
            self._num_rows,
            self._num_splits,
            **options,
        )

    def invert(self) -> None:
        """Draw the tokens of the rows that are not greedy."""
        masses = self._empty(torch.float64, *self._grid)
        weigh_split[self._grid](
            self._scores,
            *self._state,
            masses,
            self._num_rows,
            self._vocab,
            self._scores.stride(0),
            SPLIT_SIZE,
            BLOCK=BLOCK,
            num_warps=4,
        )
        invert_row[(self._num_rows,)](
            self._scores,
            *self._state,
            masses,
            self._uniforms,
            self.tokens,
            self._num_rows,
            self._vocab,
            self._num_splits,
            self._scores.stride(0),
            SPLIT_SIZE,
            S_PAD=self._splits_pad,
            BLOCK=BLOCK,
            num_warps=4,
        )
