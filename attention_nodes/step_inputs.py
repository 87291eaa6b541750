"""From a planned micro-batch to the tensors that its layers need.

Owns the index arithmetic: token ids, rotary angles, cache slots, attention metadata,
rows to sample. Knows no weights and runs no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention_nodes.rotary import RotaryTable
from attention_nodes.sequences import IntArray, SequenceTable, unpack
from kernels.contracts import AttentionMeta
from topspin.errors import ProtocolError
from topspin.messages import MicroBatch


@dataclass(frozen=True, eq=False)
class MicroBatchInputs:
    """One micro-batch of T tokens over S slices, ready to run.

    `rows` and `counts` [S] name the sequences and how far each advances; `sample_rows` are
    the token rows whose logits are sampled, `sampled` [*] the sequence rows they belong to.
    `num_rows` i64[1]: the rows of T from num_rows[0] on are padding; None: none is.
    """

    tokens: Tensor
    cos: Tensor
    sin: Tensor
    kv_slots: Tensor
    meta: AttentionMeta
    rows: IntArray
    counts: IntArray
    sample_rows: Tensor
    sampled: IntArray
    seq_ids: IntArray
    num_rows: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return int(self.tokens.shape[0])


def build_inputs(plan: MicroBatch, table: SequenceTable, rotary: RotaryTable) -> MicroBatchInputs:
    """Turn `plan` into tensors, giving its sequences their new blocks.

    Raises ProtocolError if the plan contradicts what the node knows.
    """
    seq_ids = unpack(plan.seq_ids, what="seq_ids")
    counts = unpack(plan.num_tokens, what="num_tokens")
    block_counts = unpack(plan.block_counts, what="block_counts")
    blocks = unpack(plan.block_ids, what="block_ids")
    sample = np.frombuffer(plan.sample, dtype=np.uint8).astype(bool)
    if not len(seq_ids) == len(counts) == len(block_counts) == len(sample):
        raise ProtocolError("a micro-batch's arrays differ in length")
    if block_counts.sum() != len(blocks) or (block_counts < 0).any():
        raise ProtocolError("a micro-batch's block counts do not match its block ids")
    rows = table.rows_of(seq_ids)
    block_ends = np.cumsum(block_counts)
    for idx in np.flatnonzero(block_counts).tolist():
        table.add_blocks(
            int(rows[idx]), blocks[block_ends[idx] - block_counts[idx] : block_ends[idx]]
        )
    table.check_advance(rows, counts)
    query_start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start[1:])
    row_of_token = np.repeat(rows, counts)
    starts = table.num_committed[rows] - query_start[:-1]
    positions = np.arange(query_start[-1]) + np.repeat(starts, counts)
    context_lens = table.num_committed[rows] + counts
    max_context_len = int(context_lens.max(initial=0))
    num_columns = -(-max_context_len // table.limits.block_size)
    block_of_token = table.block_tables[row_of_token, positions // table.limits.block_size]
    kv_slots = (
        block_of_token.astype(np.int64) * table.limits.block_size
        + positions % table.limits.block_size
    )
    cos, sin = rotary.gather(positions, table.num_prompt[row_of_token])
    return MicroBatchInputs(
        tokens=torch.from_numpy(table.tokens[row_of_token, positions].astype(np.int64)),
        cos=cos,
        sin=sin,
        kv_slots=torch.from_numpy(kv_slots),
        meta=AttentionMeta(
            query_start=torch.from_numpy(query_start.astype(np.int32)),
            context_lens=torch.from_numpy(context_lens.astype(np.int32)),
            block_tables=torch.from_numpy(table.block_tables[rows, :num_columns]),
            max_query_len=int(counts.max(initial=0)),
            max_context_len=max_context_len,
        ),
        rows=rows,
        counts=counts,
        sample_rows=torch.from_numpy(query_start[1:][sample] - 1),
        sampled=rows[sample],
        seq_ids=seq_ids[sample],
    )
