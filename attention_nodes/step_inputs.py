"""Turns a planned micro-batch into the indices that its layers need, on the host.

Owns the index arithmetic: token ids, positions, cache slots, attention's metadata, rows to
sample; and the tensors of these for a node on the CPU (device_inputs.py: for a GPU). Knows no
weights and runs no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_nodes.rotary import RotaryTable
from attention_nodes.sequences import IntArray, SequenceTable, unpack
from kernels.contracts import AttentionMeta
from topspin.errors import ProtocolError
from topspin.messages import SAMPLE, MicroBatch


@dataclass(frozen=True, eq=False)
class MicroBatchInputs:
    """One micro-batch of T rows over S sequences, ready to run.

    `start` is the index of its first row in the step. `num_rows` i64[1]: rows from num_rows[0] on
    are padding; None: no padding.
    """

    start: int
    num_tokens: int
    cos: Tensor
    sin: Tensor
    kv_slots: Tensor
    meta: AttentionMeta
    num_rows: Tensor | None = None


@dataclass(frozen=True, eq=False)
class StepInputs:
    """All micro-batches of a step, their rows one after the other.

    tokens i64[T] are embedded as the residual stream; sample_rows i64[R] are the rows whose
    logits are needed.
    """

    tokens: Tensor
    parts: list[MicroBatchInputs]
    sample_rows: Tensor


class Slices(NamedTuple):
    """One micro-batch as arrays: T tokens over S slices, of which R are sampled.

    `rows` and `counts` [S] are the sequences' rows and the tokens that each advances by. An entry
    of `tokens` [T] is PENDING if a step under way samples it: it is then the last token of the
    sequence in `row_of_token`. `prompt_lens` [T] are the prompts' lengths. `sample_rows` [R] are
    the token rows that are sampled, `sampled` and `seq_ids` [R] the sequences' rows and ids.
    """

    rows: IntArray
    counts: IntArray
    tokens: IntArray
    row_of_token: IntArray
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
    sampled: IntArray
    seq_ids: IntArray

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return len(self.tokens)


def slice_up(plan: MicroBatch, table: SequenceTable) -> Slices:
    """Turn `plan` into indices and add the new blocks to its sequences.

    Raises ProtocolError if the plan contradicts the node's state.
    """
    seq_ids = unpack(plan.seq_ids, what="seq_ids")
    counts = unpack(plan.num_tokens, what="num_tokens")
    wanted = np.frombuffer(plan.wanted, dtype=np.uint8)
    if not len(seq_ids) == len(counts) == len(wanted):
        raise ProtocolError("a micro-batch's arrays differ in length")
    sample = (wanted & SAMPLE).astype(bool)
    rows = table.rows_of(seq_ids)
    _add_blocks(plan, rows, table)
    table.check_advance(rows, counts)
    query_start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start[1:])
    row_of_token = np.repeat(rows, counts)
    starts = table.num_committed[rows] - query_start[:-1]
    positions = np.arange(query_start[-1]) + np.repeat(starts, counts)
    context_lens = table.num_committed[rows] + counts
    block_size = table.limits.block_size
    num_columns = -(-int(context_lens.max(initial=0)) // block_size)
    block_of_token = table.block_tables[row_of_token, positions // block_size]
    return Slices(
        rows=rows,
        counts=counts,
        tokens=table.tokens[row_of_token, positions].astype(np.int64),
        row_of_token=row_of_token,
        positions=positions,
        prompt_lens=table.num_prompt[row_of_token],
        kv_slots=block_of_token.astype(np.int64) * block_size + positions % block_size,
        query_start=query_start.astype(np.int32),
        context_lens=context_lens.astype(np.int32),
        block_tables=table.block_tables[rows, :num_columns],
        sample_rows=query_start[1:][sample] - 1,
        sampled=rows[sample],
        seq_ids=seq_ids[sample],
    )


def _add_blocks(plan: MicroBatch, rows: IntArray, table: SequenceTable) -> None:
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
        cos, sin = rotary.gather(slices.positions, slices.prompt_lens)
        parts.append(
            MicroBatchInputs(
                start=start,
                num_tokens=slices.num_tokens,
                cos=cos,
                sin=sin,
                kv_slots=torch.from_numpy(slices.kv_slots),
                meta=AttentionMeta(
                    query_start=torch.from_numpy(slices.query_start),
                    context_lens=torch.from_numpy(slices.context_lens),
                    block_tables=torch.from_numpy(slices.block_tables),
                    max_query_len=int(slices.counts.max(initial=0)),
                    max_context_len=int(slices.context_lens.max(initial=0)),
                ),
            )
        )
        sample_rows.append(slices.sample_rows + start)
        start += slices.num_tokens
    return StepInputs(
        tokens=torch.from_numpy(joined([slices.tokens for slices in micro_batches])),
        parts=parts,
        sample_rows=torch.from_numpy(joined(sample_rows)),
    )


def joined(arrays: Sequence[IntArray]) -> IntArray:
    """Return the arrays concatenated; a single array is returned as it is."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
