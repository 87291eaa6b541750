"""Turns logits into a step's result: the settings of each row, the draw, the packed answer.

Owns the translation of sequences' SamplingParams into one SamplingBatch and of drawn
tokens into the fields of StepResult. Three parts, since on a GPU they run at three times:
`ask` needs no logits, `draw` only enqueues, `judge` and `answer` need the draws on the host. The
arithmetic is that of the kernels (Ops.sample); knows no model.

Owns the log-probabilities of known tokens too, those of prompts: from finished rows to
log-probabilities and ranks in StepResult. They are of the model's own distribution: no temperature,
no penalty. The logits of few rows exist at a time, since a chunk of a prompt has thousands of rows
and each has a logit per token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_nodes.grammars.processes import Grammars
from attention_nodes.sampling.constraints import UNCONSTRAINED, Constrained, Constraints
from attention_nodes.step.sequences import REALS, IntArray, SequenceTable
from attention_nodes.step.step_inputs import Drafted, Scored, Slices, ToScore, joined
from kernels.dispatch import Ops
from kernels.sampling import BannedTokens, LogitBias, SampleResult, SamplingBatch
from spec_decode.draft import accepted
from topspin.messages import NOT_NUMBERS, SamplingParams, TokenLogprobs, pack_ints

ROWS_AT_ONCE: Final = 64
NO_TOKEN: Final = (
    "the request's penalties, logit_bias, banned stop tokens, bad_words, allowed_token_ids and "
    "grammar leave no token to choose"
)


class Drawn(NamedTuple):
    """The samples of a step, in the form of StepResult's fields."""

    seq_ids: bytes
    counts: bytes
    tokens: bytes
    logprobs: dict[int, tuple[TokenLogprobs, ...]]
    errors: dict[int, str]
    refused: dict[int, str]
    drafted: bytes = b""


class Sampled(NamedTuple):
    """The R token rows that a step samples, in order: their sequences' rows of the table and ids.

    A sequence has one, and one per token of its draft behind it. `drafted` are the drafts.
    """

    rows: IntArray
    seq_ids: IntArray
    drafted: tuple[Drafted, ...] = ()

    @classmethod
    def of(cls, micro_batches: Sequence[Slices]) -> Sampled:
        """Return the sampled rows of a step."""
        drafted: list[Drafted] = []
        begin = 0
        for slices in micro_batches:
            drafted += [each._replace(first=begin + each.first) for each in slices.drafted]
            begin += len(slices.sampled)
        return cls(
            joined([slices.sampled for slices in micro_batches]),
            joined([slices.seq_ids for slices in micro_batches]),
            tuple(drafted),
        )

    def of_roots(self, values: IntArray) -> IntArray:
        """Return those of `values` [R] that are of the first rows of the sequences."""
        return values[self.roots] if self.drafted else values

    @property
    def roots(self) -> IntArray:
        """Return the first row of each sequence."""
        if not self.drafted:
            return np.arange(len(self.rows))
        is_root = np.ones(len(self.rows), dtype=bool)
        for each in self.drafted:
            is_root[each.first + 1 : each.first + 1 + len(each.draft.tokens)] = False
        return np.flatnonzero(is_root)


class SampleVerdict(NamedTuple):
    """The rows whose tokens are the sequences' next ones, and how many rows each sequence has."""

    rows: IntArray
    counts: IntArray


NO_VERDICT: Final = SampleVerdict(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
"""Of a step that samples nothing."""


class AskedRows(NamedTuple):
    """The R rows that a step samples, and their settings.

    `refused` and `failed` (Constrained), by sequence id: why some cannot go on, whatever is drawn.
    """

    sampled: Sampled
    params: list[SamplingParams]
    batch: SamplingBatch
    num_top_logprobs: int | None
    refused: dict[int, str]
    failed: dict[int, str]


class Sampler:
    """Samples for the sequences of one table."""

    def __init__(self, table: SequenceTable, ops: Ops, grammars: Grammars | None = None) -> None:
        self._table = table
        self._ops = ops
        self._constraints = Constraints(table, grammars)

    def needs_values(self, rows: IntArray) -> bool:
        """Return whether sampling `rows` reads the values of their tokens, not only the count."""
        params = (self._table.sampling(row) for row in rows.tolist())
        return any(each.has_penalty or each.is_constrained for each in params)

    def end(self, seq_id: int) -> None:
        """Forget a sequence."""
        if seq_id in self._constraints.states:
            self._constraints.end(seq_id)

    def ask(self, sampled: Sampled) -> AskedRows:
        """Gather the sampling settings for the next token of each row.

        Call after commit() and before reserve(); if needs_values(), no token may be PENDING.
        """
        rows = sampled.rows
        if self._table.is_plain[rows].all():
            positions = self._positions(rows, _paths(sampled))
            batch = SamplingBatch(**self._columns(rows, positions), is_plain=True)
            return AskedRows(sampled, [], batch, None, {}, {})
        params = [self._table.sampling(row) for row in rows.tolist()]
        wanted = [each.logprobs for each in params if each.logprobs is not None]
        constrained = UNCONSTRAINED
        if any(each.is_constrained for each in params):
            seq_ids = sampled.seq_ids.tolist()
            constrained = self._constraints.of(rows.tolist(), seq_ids, params, sampled.drafted)
        batch = self._batch(rows, params, _paths(sampled), constrained)
        most = max(wanted) if wanted else None
        return AskedRows(sampled, params, batch, most, constrained.refused, constrained.failed)

    def draw(self, logits: Tensor, asked: AskedRows) -> list[Tensor]:
        """Draw a token for each row of fp32 logits [R, V]; return the tensors for answer().

        The first tensor is the tokens, i64[R]. All are on the device of the logits.
        """
        result = self._ops.sample(logits, asked.batch, num_top_logprobs=asked.num_top_logprobs)
        drawn = [result.tokens, result.valid, result.is_number]
        if result.logprobs is not None:
            assert result.top_ids is not None
            assert result.top_logprobs is not None
            drawn += [result.logprobs, result.top_ids, result.top_logprobs]
            drawn += _named_logprobs(logits, result, asked.params)
        return drawn

    @staticmethod
    def judge(asked: AskedRows, drawn: Sequence[np.ndarray]) -> SampleVerdict:
        """Return which rows of draw(), now on the host, give their sequences' next tokens.

        All of them, without drafts; else of each sequence the rows of the root and of the tokens
        accepted behind it.
        """
        rows, drafted = asked.sampled.roots, {each.first: each for each in asked.sampled.drafted}
        if not drafted:
            return SampleVerdict(rows, np.ones(len(rows), dtype=np.int64))
        tokens, valid = drawn[:2]
        chosen: list[int] = []
        counts = []
        for first in rows.tolist():
            path: list[int] = []
            if first in drafted:
                draft = drafted[first].draft
                mine = slice(first, first + 1 + len(draft.tokens))
                path = accepted(draft, tokens[mine].tolist(), valid[mine].tolist())
            chosen += [first, *(first + 1 + each for each in path)]
            counts.append(1 + len(path))
        return SampleVerdict(np.array(chosen, dtype=np.int64), np.array(counts, dtype=np.int64))

    @staticmethod
    def answer(
        asked: AskedRows,
        drawn: Sequence[np.ndarray],
        verdict: SampleVerdict,
        ended: Sequence[int] = (),
    ) -> Drawn:
        """Pack the arrays of draw(), now on the host; the sequences `ended` get no token.

        A row without a usable score (from the model, or after penalties, bias and bans) fails
        only its sequence, and so does one that was refused.
        """
        if not drawn:
            return Drawn(pack_ints(ended), pack_ints([0] * len(ended)), b"", {}, {}, {})
        tokens, valid, is_number = drawn[:3]
        rows, counts = verdict
        seq_ids = asked.sampled.seq_ids
        is_failed = ~valid[rows]
        refused, errors = dict(asked.refused), dict(asked.failed)
        if refused or errors:
            is_failed |= np.isin(seq_ids[rows], [*refused, *errors])
        for row in rows[is_failed].tolist():
            if int(seq_ids[row]) in errors:
                continue
            if is_number[row]:
                refused.setdefault(int(seq_ids[row]), NO_TOKEN)
            else:
                errors[int(seq_ids[row])] = NOT_NUMBERS
        if errors or refused:
            owners = np.repeat(np.arange(len(counts)), counts)
            is_whole = np.ones(len(counts), dtype=bool)
            is_whole[owners[is_failed]] = False
            rows, counts = rows[is_whole[owners]], counts[is_whole]
        has_one_each = len(rows) == len(counts)
        firsts = rows if has_one_each else rows[np.cumsum(counts) - counts]
        is_plain = has_one_each and not ended
        return Drawn(
            seq_ids=pack_ints([*seq_ids[firsts].tolist(), *ended]),
            counts=b"" if is_plain else pack_ints([*counts.tolist(), *(0 for _ in ended)]),
            tokens=pack_ints(tokens[rows].tolist()),
            logprobs=_logprobs(asked, drawn, rows) if len(drawn) > 3 else {},
            errors=errors,
            refused=refused,
            drafted=_drafted(asked.sampled, firsts, num_ended=len(ended)),
        )

    def _positions(self, rows: IntArray, paths: dict[int, tuple[int, ...]]) -> IntArray:
        """Return the position of the token that each row samples."""
        positions: IntArray = self._table.num_known[rows]
        for idx, path in paths.items():
            positions[idx] += len(path)
        return positions

    def _columns(self, rows: IntArray, positions: IntArray) -> dict[str, Any]:
        """Return the fields of a SamplingBatch that every batch has."""
        reals = torch.from_numpy(self._table.reals[rows].T.copy()).unbind()
        seeds, choices, top_k = torch.from_numpy(self._table.keys[rows].T.copy()).unbind()
        return {
            **dict(zip(REALS, reals, strict=True)),
            "top_k": top_k,
            "seeds": seeds,
            "choices": choices,
            "positions": torch.from_numpy(positions),
        }

    def _batch(
        self,
        rows: IntArray,
        params: list[SamplingParams],
        paths: dict[int, tuple[int, ...]],
        constrained: Constrained,
    ) -> SamplingBatch:
        positions = self._positions(rows, paths)
        return SamplingBatch(
            **self._columns(rows, positions),
            logit_bias=_logit_bias(params),
            banned=self._banned(rows, positions, params, constrained.banned),
            allowed=constrained.allowed,
            prompts=self._histories(rows, params, paths, outputs=False),
            outputs=self._histories(rows, params, paths, outputs=True),
        )

    def _banned(
        self,
        rows: IntArray,
        positions: IntArray,
        params: list[SamplingParams],
        others: list[tuple[int, int]],
    ) -> BannedTokens | None:
        """Return the stop tokens of the sequences that have not reached min_tokens, and others."""
        if not others and not any(each.min_tokens for each in params):
            return None
        num_outputs = positions - self._table.num_prompt[rows]
        pairs = [
            (idx, token)
            for idx, (each, count) in enumerate(zip(params, num_outputs.tolist(), strict=True))
            if count < each.min_tokens
            for token in {*each.eos_token_ids, *each.stop_token_ids}
        ]
        pairs += others
        if not pairs:
            return None
        columns = torch.tensor(pairs)
        return BannedTokens(columns[:, 0], columns[:, 1])

    def _histories(
        self,
        rows: IntArray,
        params: list[SamplingParams],
        paths: dict[int, tuple[int, ...]],
        *,
        outputs: bool,
    ) -> list[Tensor] | None:
        """Return each row's prompt or output token ids, if any row has a penalty."""
        if not any(each.has_penalty for each in params):
            return None
        table = self._table
        histories = []
        for idx, row in enumerate(rows.tolist()):
            start = int(table.num_prompt[row]) if outputs else 0
            end = int(table.num_known[row] if outputs else table.num_prompt[row])
            history = table.tokens[row, start:end]
            if outputs and idx in paths:
                history = np.append(history, np.array(paths[idx], dtype=history.dtype))
            histories.append(torch.from_numpy(history))
        return histories


def _drafted(sampled: Sampled, firsts: IntArray, *, num_ended: int) -> bytes:
    """Return the packed lengths of the drafts of the sequences whose first rows are `firsts`."""
    if not sampled.drafted:
        return b""
    lengths = {each.first: len(each.draft.tokens) for each in sampled.drafted}
    return pack_ints([*(lengths.get(first, 0) for first in firsts.tolist()), *[0] * num_ended])


def _logit_bias(params: list[SamplingParams]) -> LogitBias | None:
    rows = [idx for idx, each in enumerate(params) for _ in each.logit_bias]
    if not rows:
        return None
    ids = [token for each in params for token in each.logit_bias]
    values = [value for each in params for value in each.logit_bias.values()]
    return LogitBias(torch.tensor(rows), torch.tensor(ids), torch.tensor(values))


def _named_logprobs(
    logits: Tensor, result: SampleResult, params: Sequence[SamplingParams]
) -> list[Tensor]:
    """Return f32[R, n] of the tokens that rows ask for by id, nothing if none does.

    Rows with fewer than n, or none, are filled up with token 0.
    """
    most = max(len(each.logprob_token_ids) for each in params)
    if not most:
        return []
    assert result.logprobs is not None
    padded = [[*each.logprob_token_ids, *[0] * most][:most] for each in params]
    ids = torch.tensor(padded, device=logits.device)
    # What the chosen token's logit and log-probability differ by is the same for all of a row.
    norms = logits.gather(1, result.tokens[:, None]).float() - result.logprobs[:, None]
    return [logits.gather(1, ids).float() - norms]


def _logprobs(
    asked: AskedRows, drawn: Sequence[np.ndarray], rows: IntArray
) -> dict[int, tuple[TokenLogprobs, ...]]:
    chosen, top_ids, top_logprobs, *named = drawn[3:]
    entries: dict[int, tuple[TokenLogprobs, ...]] = {}
    for row in rows.tolist():
        num_top = asked.params[row].logprobs
        if num_top is not None:
            ids, values = top_ids[row, :num_top], top_logprobs[row, :num_top]
            shown = tuple(ids.tolist())
            if by_id := asked.params[row].logprob_token_ids:
                shown, values = by_id, named[0][row, : len(by_id)]
            entry = TokenLogprobs(float(chosen[row]), shown, tuple(values.tolist()))
            seq_id = int(asked.sampled.seq_ids[row])
            entries[seq_id] = (*entries.get(seq_id, ()), entry)
    return entries


def _paths(sampled: Sampled) -> dict[int, tuple[int, ...]]:
    """Return, by row, the draft tokens after which a draft's row samples."""
    return {
        each.first + 1 + idx: each.draft.path(idx)
        for each in sampled.drafted
        for idx in range(len(each.draft.tokens))
    }


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
            errors[each.seq_id] = NOT_NUMBERS
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
