"""From logits to a step's result: draw tokens, record them, pack the answer.

Owns the translation of sequences' SamplingParams into one SamplingBatch and of drawn
tokens into what StepResult carries. The arithmetic is kernels.sampling's; knows no
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_nodes.sequences import IntArray, SequenceTable
from attention_nodes.step_inputs import MicroBatchInputs
from kernels.philox import as_signed
from kernels.sampling import BannedTokens, LogitBias, SampleResult, SamplingBatch, sample
from topspin.messages import SamplingParams, TokenLogprobs, pack_ints


class Drawn(NamedTuple):
    """What was sampled in a step, as StepResult carries it."""

    seq_ids: bytes
    tokens: bytes
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]


class Sampler:
    """Samples for the sequences of one table, and appends to it what it drew."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table

    def sample(self, logits: Tensor, inputs: Sequence[MicroBatchInputs]) -> Drawn:
        """Draw a token for each row of fp32 logits [R, V].

        The rows are those that `inputs` asked to sample, in order, after commit(). A row
        without a usable score, the model's or after penalties, bias and bans, fails its own
        sequence and no other.
        """
        rows = np.concatenate([part.sampled for part in inputs])
        seq_ids = np.concatenate([part.seq_ids for part in inputs])
        if len(rows) == 0:
            return Drawn(b"", b"", {}, {})
        params = [self._table.sampling(row) for row in rows.tolist()]
        wanted = [each.logprobs for each in params if each.logprobs is not None]
        result = sample(
            logits, self._batch(rows, params), num_top_logprobs=max(wanted) if wanted else None
        )
        tokens, valid = result.tokens.numpy(), result.valid.numpy()
        # The failed ones' too: the next step may be planned already, and goes on from a token
        # that nobody is told.
        self._table.append(rows, tokens)
        return Drawn(
            seq_ids=pack_ints(seq_ids[valid].tolist()),
            tokens=pack_ints(tokens[valid].tolist()),
            logprobs=_logprobs(result, params, seq_ids, valid) if wanted else {},
            errors={
                int(seq_ids[idx]): _reason(logits[idx]) for idx in (~valid).nonzero()[0].tolist()
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


def _reason(logits: Tensor) -> str:
    """Say why a row of logits [V] gave no token."""
    if not bool(logits.amax().isfinite()):
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
    result: SampleResult, params: list[SamplingParams], seq_ids: IntArray, valid: np.ndarray
) -> dict[int, TokenLogprobs]:
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    entries = {}
    for idx, each in enumerate(params):
        if each.logprobs is not None and valid[idx]:
            entries[int(seq_ids[idx])] = TokenLogprobs(
                float(result.logprobs[idx]),
                tuple(result.top_ids[idx, : each.logprobs].tolist()),
                tuple(result.top_logprobs[idx, : each.logprobs].tolist()),
            )
    return entries
