"""Turns a planned micro-batch into the indices that its layers need, on the host.

Owns the index arithmetic: token ids, positions, cache slots, attention's metadata, rows to
sample and to score; and the tensors of these for a node on the CPU (device/inputs.py: for a
GPU). Knows no weights and runs no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.sequences import IntArray, SequenceTable, unpack
from kernels.contracts import AttentionMeta, Retrieval
from spec_decode.draft import Draft
from topspin.errors import ProtocolError
from topspin.messages import SAMPLE, SCORE, MicroBatch


class GroupInputs(NamedTuple):
    """The places of keys and values in the layers of one group: cache slots i64[T], and tables."""

    kv_slots: Tensor
    meta: AttentionMeta


@dataclass(frozen=True, eq=False)
class MicroBatchInputs:
    """One micro-batch of T rows over S sequences, ready to run.

    `start` is the index of its first row in the step. `num_rows` i64[1]: rows from num_rows[0] on
    are padding; None: no padding. `kv_slots` and `meta` are those of the first group of layers
    (topspin.plan.kv_cache), `further` those of the others.
    """

    start: int
    num_tokens: int
    cos: Tensor
    sin: Tensor
    kv_slots: Tensor
    meta: AttentionMeta
    num_rows: Tensor | None = None
    further: tuple[GroupInputs, ...] = ()

    def of_group(self, group: int) -> GroupInputs:
        """Return the places of keys and values in the layers of a group."""
        return self.further[group - 1] if group else GroupInputs(self.kv_slots, self.meta)


class ToScore(NamedTuple):
    """N rows, i64[N], and the tokens that follow them, i64[N]; `num_top` best tokens are wanted."""

    rows: Tensor
    targets: Tensor
    num_top: int


@dataclass(frozen=True, eq=False)
class StepInputs:
    """All micro-batches of a step, their rows one after the other.

    tokens i64[T] are embedded as the residual stream; sample_rows i64[R] are the rows that are
    sampled, `to_score` those before prompt tokens whose log-probabilities are wanted.
    """

    tokens: Tensor
    parts: list[MicroBatchInputs]
    sample_rows: Tensor
    to_score: ToScore | None = None


class Drafted(NamedTuple):
    """A draft under way, of the sequence in `row`.

    `first` is the index of its root among the sampled rows; those of its tokens follow. Token i
    is in the sequence's slot `storage` + i until the draft is settled.
    """

    row: int
    first: int
    storage: int
    draft: Draft


class Scored(NamedTuple):
    """A slice whose rows from token row `first` on precede the prompt tokens `targets` i64[N].

    `num_top` is the number of best tokens that are wanted beside each.
    """

    seq_id: int
    first: int
    targets: IntArray
    num_top: int


_NONE: Final[IntArray] = np.zeros(0, dtype=np.int64)


class GroupTables(NamedTuple):
    """Cache slots i64[T] and block tables i32[S, blocks of the longest context] of a group."""

    kv_slots: IntArray
    block_tables: np.ndarray


class Slices(NamedTuple):
    """One micro-batch as arrays: T tokens over S slices, R of them sampled.

    `counts` [S] are the token rows of each slice, those of drafts too. An entry of `tokens` [T] is
    PENDING if a step under way samples it: it is then the last token of the sequence in
    `row_of_token`. `positions` [T] are those in the text, which differ from the slots in the
    sequence where a draft branches; `prompt_lens` [T] the prompts' lengths. `sample_rows` [R] are
    the token rows that are sampled.

    Layers need no more. Of an attention node's sequences: `rows` and `certain` [S] are the
    sequences' rows and the positions that each advances by whatever is sampled; `sampled` and
    `seq_ids` [R] the rows and ids of those sampled. `ended` are the ids of slices without rows:
    their sequences were completed by the draft of a step before.
    """

    counts: IntArray
    tokens: IntArray
    positions: IntArray
    prompt_lens: IntArray
    kv_slots: IntArray
    query_start: np.ndarray
    """i32[S + 1]."""
    context_lens: np.ndarray
    """i32[S]."""
    block_tables: np.ndarray
    """i32[S, blocks of the longest context]."""
    sample_rows: IntArray
    further: tuple[GroupTables, ...] = ()
    """The places in the cache in the groups of layers after the first, whose are above."""
    tree_mask: npt.NDArray[np.bool_] | None = None
    """bool[T, most rows of a slice], as AttentionMeta's; None: no draft branches."""
    tree_lens: np.ndarray | None = None
    """i32[S], as AttentionMeta's; None: a tree is the rows of its slice."""
    retrieval: Retrieval | None = None
    """The sequences that attend to a selection of their keys; None: all attend to all."""
    rows: IntArray = _NONE
    certain: IntArray = _NONE
    row_of_token: IntArray = _NONE
    sampled: IntArray = _NONE
    seq_ids: IntArray = _NONE
    drafted: tuple[Drafted, ...] = ()
    scored: tuple[Scored, ...] = ()
    ended: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[GroupTables, ...]:
        """Return the places in the cache in each group of layers."""
        return (GroupTables(self.kv_slots, self.block_tables), *self.further)

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return len(self.tokens)


NO_SLICES: Final = Slices(
    counts=_NONE,
    tokens=_NONE,
    positions=_NONE,
    prompt_lens=_NONE,
    kv_slots=_NONE,
    query_start=np.zeros(1, dtype=np.int32),
    context_lens=np.zeros(0, dtype=np.int32),
    block_tables=np.zeros((0, 0), dtype=np.int32),
    sample_rows=_NONE,
)


def no_slices(num_groups: int) -> Slices:
    """Return a micro-batch without rows, whose layers are in `num_groups` groups."""
    others = GroupTables(NO_SLICES.kv_slots, NO_SLICES.block_tables)
    return NO_SLICES._replace(further=(others,) * (num_groups - 1))


class _Planned(NamedTuple):
    """The slices that have rows, before they have any: arrays [S]."""

    seq_ids: IntArray
    rows: IntArray
    certain: IntArray
    sample: npt.NDArray[np.bool_]
    score: npt.NDArray[np.bool_]


def slice_up(
    plan: MicroBatch, table: SequenceTable, drafts: Mapping[int, Draft] | None = None
) -> Slices:
    """Turn `plan`, and the drafts by sequence id, into indices; add new blocks to the sequences.

    Raises ProtocolError if the plan contradicts the node's state.
    """
    planned, ended = _read(plan, table)
    seq_ids, rows, certain, sample, _ = planned
    starts = table.num_committed[rows]
    counts = certain
    if drafts:
        lengths = [len(drafts[each].tokens) if each in drafts else 0 for each in seq_ids.tolist()]
        counts = certain + np.array(lengths, dtype=np.int64)
    query_start = np.zeros(len(rows) + 1, dtype=np.int64)
    counts.cumsum(out=query_start[1:])
    row_of_token, storage = rows, starts
    if query_start[-1] != len(rows):  # else each has one, at its start
        row_of_token = rows.repeat(counts)
        storage = np.arange(query_start[-1]) + (starts - query_start[:-1]).repeat(counts)
    context_lens = starts + counts
    num_columns = -(-int(context_lens.max(initial=0)) // table.limits.block_size)
    (kv_slots, block_tables), *further = (
        GroupTables(slots, table.block_tables[rows, group, :num_columns])
        for group, slots in enumerate(table.slots(row_of_token, storage))
    )
    sampled = sample.nonzero()[0]
    slices = Slices(
        rows=rows,
        certain=certain,
        counts=counts,
        tokens=table.tokens[row_of_token, storage].astype(np.int64),
        row_of_token=row_of_token,
        positions=storage,
        prompt_lens=table.num_prompt[row_of_token],
        kv_slots=kv_slots,
        query_start=query_start.astype(np.int32),
        context_lens=context_lens.astype(np.int32),
        block_tables=block_tables,
        further=tuple(further),
        sample_rows=query_start[1:][sampled] - 1,
        sampled=rows[sampled],
        seq_ids=seq_ids[sampled],
        scored=_scored(planned, query_start, table) if planned.score.any() else (),
        ended=ended,
    )
    return _with_drafts(slices, seq_ids[sampled], sampled, drafts) if drafts else slices


def _read(plan: MicroBatch, table: SequenceTable) -> tuple[_Planned, tuple[int, ...]]:
    """Return a micro-batch's slices and the ids of those that have nothing left to feed."""
    seq_ids = unpack(plan.seq_ids, what="seq_ids")
    counts = unpack(plan.num_tokens, what="num_tokens")
    wanted = np.frombuffer(plan.wanted, dtype=np.uint8)
    if not len(seq_ids) == len(counts) == len(wanted):
        raise ProtocolError("a micro-batch's arrays differ in length")
    rows = table.rows_of(seq_ids)
    _add_blocks(plan, rows, table)
    sample = (wanted & SAMPLE).astype(bool)
    planned = _Planned(seq_ids, rows, counts, sample, (wanted & SCORE).astype(bool))
    is_over = sample & (table.num_known[rows] >= table.max_length[rows])
    ended: tuple[int, ...] = ()
    if is_over.any():
        ended = tuple(seq_ids[is_over].tolist())
        left = ~is_over
        planned = _Planned(
            seq_ids[left], rows[left], counts[left], sample[left], planned.score[left]
        )
    table.check_advance(planned.rows, planned.certain)
    if plan.max_draft:
        max_draft = unpack(plan.max_draft, what="max_draft")
        if len(max_draft) != len(seq_ids) or (max_draft < 0).any():
            raise ProtocolError("a micro-batch's arrays differ in length")
        table.check_reserved(planned.rows, planned.certain, max_draft[~is_over])
    return planned, ended


def _scored(planned: _Planned, query_start: IntArray, table: SequenceTable) -> tuple[Scored, ...]:
    scored = []
    for idx in np.flatnonzero(planned.score).tolist():
        row = int(planned.rows[idx])
        begin = int(table.num_committed[row]) + 1
        end = min(begin + int(planned.certain[idx]), int(table.num_prompt[row]))
        if begin < end:
            targets = table.tokens[row, begin:end].astype(np.int64)
            num_top = table.sampling(row).prompt_logprobs or 0
            first = int(query_start[idx])
            scored.append(Scored(int(planned.seq_ids[idx]), first, targets, num_top))
    return tuple(scored)


def _with_drafts(
    slices: Slices, seq_ids: IntArray, sampled: IntArray, drafts: Mapping[int, Draft]
) -> Slices:
    """Return `slices` with the tokens of drafts; `sampled` slices have the ids `seq_ids`."""
    tokens, positions = slices.tokens, slices.positions.copy()
    lengths = np.ones(len(sampled), dtype=np.int64)
    drafted: list[Drafted] = []
    begins: list[int] = []
    num_sampled = 0
    for place, (seq_id, idx) in enumerate(zip(seq_ids.tolist(), sampled.tolist(), strict=True)):
        draft = drafts.get(seq_id)
        if draft is not None:
            begin = int(slices.query_start[idx] + slices.certain[idx])
            end, storage = begin + len(draft.tokens), int(positions[begin])
            tokens[begin:end] = draft.tokens
            positions[begin:end] = storage - 1 + draft.ancestors().sum(1)
            drafted.append(Drafted(int(slices.rows[idx]), num_sampled, storage, draft))
            begins.append(begin)
            lengths[place] += len(draft.tokens)
        num_sampled += int(lengths[place])
    nth = np.arange(num_sampled) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    roots = slices.query_start[sampled] + slices.certain[sampled] - 1
    return slices._replace(
        positions=positions,
        sample_rows=np.repeat(roots, lengths) + nth,
        sampled=np.repeat(slices.sampled, lengths),
        seq_ids=np.repeat(seq_ids, lengths),
        drafted=tuple(drafted),
        tree_mask=_tree_mask(slices, [each.draft for each in drafted], begins),
    )


def _tree_mask(
    slices: Slices, drafts: Sequence[Draft], begins: Sequence[int]
) -> npt.NDArray[np.bool_] | None:
    """Return AttentionMeta's mask, drafts beginning at the token rows `begins`.

    None if all are chains.
    """
    if all(draft.is_chain for draft in drafts):
        return None
    first_rows = np.repeat(slices.query_start[:-1], slices.counts)
    nth = np.arange(slices.num_tokens) - first_rows
    mask: npt.NDArray[np.bool_] = np.arange(int(slices.counts.max())) <= nth[:, None]
    for draft, begin in zip(drafts, begins, strict=True):
        rows, columns = slice(begin, begin + len(draft.tokens)), int(nth[begin])
        mask[rows, columns : columns + len(draft.tokens)] = draft.ancestors()
    return mask


def _add_blocks(plan: MicroBatch, rows: IntArray, table: SequenceTable) -> None:
    if (
        not any(plan.block_counts)
        and not plan.block_ids
        and len(plan.block_counts) == 4 * len(rows)
    ):
        return
    counts = unpack(plan.block_counts, what="block_counts")
    blocks = unpack(plan.block_ids, what="block_ids")
    if len(counts) != len(rows):
        raise ProtocolError("a micro-batch's arrays differ in length")
    if counts.sum() != len(blocks) or (counts < 0).any():
        raise ProtocolError("a micro-batch's block counts do not match its block ids")
    ends = np.cumsum(counts)
    for idx in np.flatnonzero(counts).tolist():
        table.add_blocks(int(rows[idx]), blocks[ends[idx] - counts[idx] : ends[idx]])


def host_inputs(micro_batches: Sequence[Slices], rotary: RotaryTable) -> StepInputs:
    """Return the tensors of a step on the CPU; its tokens must all be known."""
    parts = []
    sample_rows = []
    start = 0
    for slices in micro_batches:
        parts.append(host_part(slices, rotary, start=start))
        sample_rows.append(slices.sample_rows + start)
        start += slices.num_tokens
    return StepInputs(
        tokens=torch.from_numpy(joined([slices.tokens for slices in micro_batches])),
        parts=parts,
        sample_rows=torch.from_numpy(joined(sample_rows)),
        to_score=to_score(micro_batches, [part.start for part in parts], torch.device("cpu")),
    )


def host_part(slices: Slices, rotary: RotaryTable, *, start: int = 0) -> MicroBatchInputs:
    """Return the tensors, on the CPU, of a micro-batch that begins at the step's row `start`."""
    cos, sin = rotary.gather(slices.positions, slices.prompt_lens)
    meta = host_meta(slices)
    return MicroBatchInputs(
        start=start,
        num_tokens=len(slices.tokens),
        cos=cos,
        sin=sin,
        kv_slots=torch.from_numpy(slices.kv_slots),
        meta=meta,
        further=tuple(
            GroupInputs(torch.from_numpy(slots), of_tables(meta, torch.from_numpy(tables)))
            for slots, tables in slices.further
        ),
    )


def host_meta(slices: Slices) -> AttentionMeta:
    """Return what attention needs to know of a micro-batch, on the CPU."""
    lens = slices.tree_lens
    return AttentionMeta(
        query_start=torch.from_numpy(slices.query_start),
        context_lens=torch.from_numpy(slices.context_lens),
        block_tables=torch.from_numpy(slices.block_tables),
        max_query_len=int(slices.counts.max(initial=0)),
        max_context_len=int(slices.context_lens.max(initial=0)),
        tree_mask=mask_of(slices, torch.device("cpu")),
        tree_lens=None if lens is None else torch.from_numpy(lens),
        retrieval=slices.retrieval,
    )


def of_tables(meta: AttentionMeta, block_tables: Tensor) -> AttentionMeta:
    """Return what attention needs to know in the layers of another group."""
    return replace(meta, block_tables=block_tables, memo={})


def mask_of(slices: Slices, device: torch.device) -> Tensor | None:
    """Return the tree mask on `device`."""
    return None if slices.tree_mask is None else torch.from_numpy(slices.tree_mask).to(device)


def to_score(
    micro_batches: Sequence[Slices], starts: Sequence[int], device: torch.device
) -> ToScore | None:
    """Return the rows to score of micro-batches that begin at the step's rows `starts`."""
    scored = [
        (each, start + each.first)
        for slices, start in zip(micro_batches, starts, strict=True)
        for each in slices.scored
    ]
    if not scored:
        return None
    rows = [first + np.arange(len(each.targets)) for each, first in scored]
    return ToScore(
        torch.from_numpy(np.concatenate(rows)).to(device),
        torch.from_numpy(np.concatenate([each.targets for each, _ in scored])).to(device),
        max(each.num_top for each, _ in scored),
    )


def joined(arrays: Sequence[IntArray]) -> IntArray:
    """Return the arrays concatenated; a single array is returned as it is."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
