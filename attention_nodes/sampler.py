"""Turns logits into a step's result: the settings of each row, the draw, the packed answer.

Owns the translation of sequences' SamplingParams into one SamplingBatch and of drawn
tokens into the fields of StepResult. Three parts, since on a GPU they run at three times:
`ask` needs no logits, `draw` only enqueues, `answer` needs the draws on the host. The
arithmetic is that of the kernels (Ops.sample); knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_nodes.sequences import IntArray, SequenceTable
from kernels.dispatch import Ops
from kernels.philox import as_signed
from kernels.sampling import BannedTokens, LogitBias, SamplingBatch
from topspin.messages import SamplingParams, TokenLogprobs, pack_ints


class Drawn(NamedTuple):
    """The samples of a step, in the form of StepResult's fields."""

    seq_ids: bytes
    tokens: bytes
    logprobs: dict[int, tuple[TokenLogprobs, ...]]
    errors: dict[int, str]


class Asked(NamedTuple):
    """The R sequences that a step samples, by their rows of the table, in order."""

    rows: IntArray
    seq_ids: IntArray
    params: list[SamplingParams]
    batch: SamplingBatch
    num_top_logprobs: int | None

    @property
    def is_processed(self) -> bool:
        """Return whether anything but the temperature and filters changes a row's logits."""
        batch = self.batch
        has_edits = batch.logit_bias is not None or batch.banned is not None
        return has_edits or bool(batch.penalised_rows)


class Sampler:
    """Samples for the sequences of one table."""

    def __init__(self, table: SequenceTable, ops: Ops) -> None:
        self._table = table
        self._ops = ops

    def needs_values(self, rows: IntArray) -> bool:
        """Return whether sampling `rows` reads the values of their tokens, not only the count."""
        return any(_has_penalty(self._table.sampling(row)) for row in rows.tolist())

    def ask(self, rows: IntArray, seq_ids: IntArray) -> Asked:
        """Gather the sampling settings for the next token of each row.

        Call after commit() and before reserve(); if needs_values(), no token may be PENDING.
        """
        params = [self._table.sampling(row) for row in rows.tolist()]
        wanted = [each.logprobs for each in params if each.logprobs is not None]
        return Asked(
            rows, seq_ids, params, self._batch(rows, params), max(wanted) if wanted else None
        )

    def draw(self, logits: Tensor, asked: Asked) -> list[Tensor]:
        """Draw a token for each row of fp32 logits [R, V]; return the tensors for answer().

        The first tensor is the tokens, i64[R]. All are on the device of the logits.
        """
        result = self._ops.sample(logits, asked.batch, num_top_logprobs=asked.num_top_logprobs)
        drawn = [result.tokens, result.valid]
        # Without processing only the model itself can be at fault.
        drawn.append(logits.amax(-1).isfinite() if asked.is_processed else result.valid)
        if result.logprobs is not None:
            assert result.top_ids is not None
            assert result.top_logprobs is not None
            drawn += [result.logprobs, result.top_ids, result.top_logprobs]
        return drawn

    @staticmethod
    def answer(asked: Asked, drawn: Sequence[np.ndarray]) -> Drawn:
        """Pack the arrays of draw(), now on the host; empty if no row was asked for.

        A row without a usable score (from the model, or after penalties, bias and bans) fails
        only its sequence.
        """
        if not drawn:
            return Drawn(b"", b"", {}, {})
        tokens, valid, is_number = drawn[:3]
        seq_ids = asked.seq_ids
        return Drawn(
            seq_ids=pack_ints(seq_ids[valid].tolist()),
            tokens=pack_ints(tokens[valid].tolist()),
            logprobs=_logprobs(asked, drawn, valid) if len(drawn) > 3 else {},
            errors={
                int(seq_ids[idx]): _reason(is_number=bool(is_number[idx]))
                for idx in (~valid).nonzero()[0].tolist()
            },
        )

    def _batch(self, rows: IntArray, params: list[SamplingParams]) -> SamplingBatch:
        positions = self._table.num_known[rows]
        return SamplingBatch(
            temperature=torch.tensor([each.temperature for each in params]),
            top_k=torch.tensor([each.top_k for each in params]),
            top_p=torch.tensor([each.top_p for each in params]),
            min_p=torch.tensor([each.min_p for each in params]),
            presence_penalty=torch.tensor([each.presence_penalty for each in params]),
            frequency_penalty=torch.tensor([each.frequency_penalty for each in params]),
            repetition_penalty=torch.tensor([each.repetition_penalty for each in params]),
            seeds=torch.tensor([as_signed(each.seed) for each in params]),
            choices=torch.tensor([each.choice for each in params]),
            positions=torch.from_numpy(positions),
            logit_bias=_logit_bias(params),
            banned=self._banned(rows, params),
            prompts=self._histories(rows, params, outputs=False),
            outputs=self._histories(rows, params, outputs=True),
        )

    def _banned(self, rows: IntArray, params: list[SamplingParams]) -> BannedTokens | None:
        """Return the stop tokens of the sequences that have not reached min_tokens."""
        num_outputs = self._table.num_known[rows] - self._table.num_prompt[rows]
        pairs = [
            (idx, token)
            for idx, (each, count) in enumerate(zip(params, num_outputs.tolist(), strict=True))
            if count < each.min_tokens
            for token in {*each.eos_token_ids, *each.stop_token_ids}
        ]
        if not pairs:
            return None
        columns = torch.tensor(pairs)
        return BannedTokens(columns[:, 0], columns[:, 1])

    def _histories(
        self, rows: IntArray, params: list[SamplingParams], *, outputs: bool
    ) -> list[Tensor] | None:
        """Return each row's prompt or output token ids, if any row has a penalty."""
        if not any(_has_penalty(each) for each in params):
            return None
        table = self._table
        histories = []
        for row in rows.tolist():
            start = int(table.num_prompt[row]) if outputs else 0
            end = int(table.num_known[row] if outputs else table.num_prompt[row])
            histories.append(torch.from_numpy(table.tokens[row, start:end]))
        return histories


def _reason(*, is_number: bool) -> str:
    """Return why a row gave no token; `is_number`: the model's greatest logit is finite."""
    if not is_number:
        return "the model's logits are not numbers"
    return "the request's penalties, logit_bias and banned stop tokens leave no token to choose"


def _has_penalty(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )


def _logit_bias(params: list[SamplingParams]) -> LogitBias | None:
    rows = [idx for idx, each in enumerate(params) for _ in each.logit_bias]
    if not rows:
        return None
    ids = [token for each in params for token in each.logit_bias]
    values = [value for each in params for value in each.logit_bias.values()]
    return LogitBias(torch.tensor(rows), torch.tensor(ids), torch.tensor(values))


def _logprobs(
    asked: Asked, drawn: Sequence[np.ndarray], valid: np.ndarray
) -> dict[int, tuple[TokenLogprobs, ...]]:
    chosen, top_ids, top_logprobs = drawn[3:]
    entries: dict[int, tuple[TokenLogprobs, ...]] = {}
    for idx, each in enumerate(asked.params):
        if each.logprobs is not None and valid[idx]:
            entry = TokenLogprobs(
                float(chosen[idx]),
                tuple(top_ids[idx, : each.logprobs].tolist()),
                tuple(top_logprobs[idx, : each.logprobs].tolist()),
            )
            entries[int(asked.seq_ids[idx])] = (entry,)
    return entries
