"""A step's indices on a device: one transfer into memory whose addresses depend on sizes only.

Owns the layout of that transfer, the padding of recorded steps, and the data that stays on the
device between steps: angles by position, block tables, and each sequence's last sampled token,
since a step may begin with tokens that the host does not know yet. Knows no layer. Called by
device/executor.py.

A step of m micro-batches padded to B rows has m * B rows; those that are padding have token 0,
position 0, no query, no cache slot (-1) and no expert (MicroBatchInputs.num_rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from attention_nodes.device.staging import ALIGNMENT, Outbound
from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.sequences import PENDING, IntArray, TableLimits
from attention_nodes.step.step_inputs import (
    GroupInputs,
    MicroBatchInputs,
    Slices,
    StepInputs,
    ToScore,
    joined,
    mask_of,
    of_tables,
    to_score,
)
from kernels.contracts import SEGMENT_KEYS, AttentionMeta, Retrieval, SearchBounds
from kernels.runtime import Runtime
from topspin.errors import ProtocolError
from topspin.plan.settings import MAX_MICRO_BATCHES

NO_SLOT = -1


@dataclass(frozen=True, eq=False)
class PlacedInputs:
    """The tensors of one transfer: m micro-batches of T rows together, R of them sampled.

    A row's token is `literals` + `last[last_rows]` (the spare last entry of `last` is 0).
    `angles` is (positions i64[T],), or (cos, sin) f32[T, D/2] each where they depend on more than
    the position. Of each group of layers are a row of `kv_slots` i64[groups, T], and in `metas` an
    entry of each micro-batch. `sampled` i64[R] are the entries of `last` that the step updates.
    """

    literals: Tensor
    last_rows: Tensor
    angles: tuple[Tensor, ...]
    kv_slots: Tensor
    sample_rows: Tensor
    sampled: Tensor
    num_rows: Tensor | None
    metas: list[tuple[AttentionMeta, ...]]
    starts: list[int]
    to_score: ToScore | None


class DeviceInputs:
    """The device memory for the indices of steps, which run in order on one stream."""

    def __init__(
        self,
        runtime: Runtime,
        rotary: RotaryTable,
        limits: TableLimits,
        *,
        max_tokens: int,
        max_seqs: int,
        max_rows: int,
        max_padded: int,
    ) -> None:
        """Serve steps of `max_tokens` over `max_seqs` slices, or padded to `max_padded` rows.

        `max_rows` is the most sequences that the table ever holds at once.
        """
        self._runtime = runtime
        self._rotary = rotary
        self._max_seqs = max_seqs
        self._max_rows = max_rows
        self._max_len = limits.max_len
        device = self._device = runtime.device
        table = rotary.table
        self._table = None if table is None else tuple(each.to(device) for each in table)
        # The last entry belongs to no sequence and stays 0.
        self._last = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        max_blocks = -(-limits.max_len // limits.block_size)
        self._num_groups = limits.num_groups
        shape = (limits.num_groups, max_padded, max_blocks)
        self._block_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._outbound = Outbound(
            runtime,
            _most_bytes(
                max(max_tokens, max_padded),
                max(max_seqs, max_padded),
                max_seqs * max_blocks,
                limits.num_groups,
                0 if table is not None else 4 * rotary.width,
            ),
        )

    def place(self, micro_batches: Sequence[Slices], bucket: int | None) -> PlacedInputs:
        """Enqueue the transfer of a step, each micro-batch padded to `bucket` rows if given."""
        num_seqs = sum(len(slices.rows) for slices in micro_batches)
        if num_seqs > self._max_seqs:
            raise ProtocolError(f"{num_seqs} sequences in a step, more than {self._max_seqs}")
        highest = max((int(slices.rows.max(initial=0)) for slices in micro_batches), default=0)
        if highest >= self._max_rows:
            raise ProtocolError(f"more than {self._max_rows} sequences are on this node")
        sizes = [bucket or slices.num_tokens for slices in micro_batches]
        sent = self._send(micro_batches, sizes, bucket)
        if bucket is None:
            return sent
        return self._with_static_tables(sent, micro_batches, bucket)

    def _send(
        self, micro_batches: Sequence[Slices], sizes: list[int], bucket: int | None
    ) -> PlacedInputs:
        starts = [0, *accumulate(sizes)]
        arrays = self._arrays(micro_batches, sizes, starts, bucket)
        metas = [
            (slices.query_start, slices.context_lens)
            if bucket is None
            else (_grown(slices.query_start, bucket), _padded(slices.context_lens, bucket, 0))
            for slices in micro_batches
        ]
        # Last, since their width differs from step to step.
        tables = [each.block_tables for slices in micro_batches for each in slices.groups]
        sent = self._outbound.send([*arrays, *chain.from_iterable(metas), *tables])
        num_rows, *angles = sent[5 : len(arrays)]
        pairs = sent[len(arrays) : len(arrays) + 2 * len(metas)]
        own = sent[-len(tables) :]
        return PlacedInputs(
            literals=sent[0],
            last_rows=sent[1],
            kv_slots=sent[2].view(self._num_groups, -1),
            sample_rows=sent[3],
            sampled=sent[4],
            num_rows=None if bucket is None else num_rows,
            angles=tuple(angles),
            metas=[
                _of_groups(
                    AttentionMeta(
                        query_start=pairs[2 * idx],
                        context_lens=pairs[2 * idx + 1],
                        block_tables=own[idx * self._num_groups],
                        max_query_len=int(slices.counts.max(initial=0)),
                        max_context_len=int(slices.context_lens.max(initial=0)),
                        tree_mask=mask_of(slices, self._device),
                        retrieval=_uploaded(slices, self._runtime),
                    ),
                    own[idx * self._num_groups + 1 : (idx + 1) * self._num_groups],
                )
                for idx, slices in enumerate(micro_batches)
            ],
            starts=starts,
            # These, the masks and retrievals are not worth a place in the one transfer.
            to_score=to_score(micro_batches, starts[:-1], self._device),
        )

    def _arrays(
        self,
        micro_batches: Sequence[Slices],
        sizes: list[int],
        starts: list[int],
        bucket: int | None,
    ) -> list[np.ndarray]:
        """Return a step's arrays by row and by sample: literals to num_rows, then the angles."""

        def padded(name: str, fill: int) -> IntArray:
            each = zip(micro_batches, sizes, strict=True)
            return joined([_padded(getattr(slices, name), size, fill) for slices, size in each])

        tokens, positions = padded("tokens", 0), padded("positions", 0)
        is_pending = tokens == PENDING
        sampled = joined([slices.sampled for slices in micro_batches])
        sample_rows = joined(
            [slices.sample_rows + starts[idx] for idx, slices in enumerate(micro_batches)]
        )
        if bucket is not None:
            most = min(len(tokens), self._max_seqs)
            sampled, sample_rows = _padded(sampled, most, 0), _padded(sample_rows, most, 0)
        angles: tuple[np.ndarray, ...] = (positions,)
        if self._table is None:
            both = self._rotary.gather(positions, padded("prompt_lens", 1))
            angles = tuple(each.numpy() for each in both)
        return [
            np.where(is_pending, 0, tokens),
            np.where(is_pending, padded("row_of_token", 0), self._max_rows),
            joined(
                [
                    _padded(slices.groups[group].kv_slots, size, NO_SLOT)
                    for group in range(self._num_groups)
                    for slices, size in zip(micro_batches, sizes, strict=True)
                ]
            ),
            sample_rows,
            sampled,
            np.array([slices.num_tokens for slices in micro_batches]),
            *angles,
        ]

    def _with_static_tables(
        self, sent: PlacedInputs, micro_batches: Sequence[Slices], bucket: int
    ) -> PlacedInputs:
        """Copy the block tables, of any width, to the fixed memory that recordings read."""
        metas = []
        for idx, (first, *others) in enumerate(sent.metas):
            tables = self._block_tables[:, idx * bucket : (idx + 1) * bucket]
            for table, meta in zip(tables, (first, *others), strict=True):
                rows, columns = meta.block_tables.shape
                if rows and columns:
                    table[:rows, :columns].copy_(meta.block_tables)
            fixed = AttentionMeta(
                query_start=first.query_start,
                context_lens=first.context_lens,
                block_tables=tables[0],
                max_query_len=1,
                max_context_len=self._max_len,
            )
            metas.append(_of_groups(fixed, list(tables[1:])))
        return replace(sent, metas=metas)

    def complete(self, placed: PlacedInputs) -> StepInputs:
        """Enqueue the gathering of tokens and angles; may be recorded."""
        angles = placed.angles
        if self._table is not None:
            angles = tuple(each.index_select(0, angles[0]) for each in self._table)
        cos, sin = angles
        parts = []
        for idx, (meta, *others) in enumerate(placed.metas):
            begin, end = placed.starts[idx : idx + 2]
            parts.append(
                MicroBatchInputs(
                    start=begin,
                    num_tokens=end - begin,
                    cos=cos[begin:end],
                    sin=sin[begin:end],
                    kv_slots=placed.kv_slots[0, begin:end],
                    meta=meta,
                    num_rows=None if placed.num_rows is None else placed.num_rows[idx : idx + 1],
                    further=tuple(
                        GroupInputs(slots[begin:end], each)
                        for slots, each in zip(placed.kv_slots[1:], others, strict=True)
                    ),
                )
            )
        tokens = placed.literals + self._last.index_select(0, placed.last_rows)
        return StepInputs(
            tokens=tokens, parts=parts, sample_rows=placed.sample_rows, to_score=placed.to_score
        )

    def keep(self, placed: PlacedInputs, tokens: Tensor) -> None:
        """Enqueue the update of the sequences' last tokens to tokens i64[R]."""
        self._last.index_copy_(0, placed.sampled[: len(tokens)], tokens)


def _of_groups(first: AttentionMeta, tables: Sequence[Tensor]) -> tuple[AttentionMeta, ...]:
    """Return what attention needs to know in each group: in the others it reads other `tables`."""
    return (first, *(of_tables(first, table) for table in tables))


def _uploaded(slices: Slices, runtime: Runtime) -> Retrieval | None:
    """Return on the device, and with bounds, which sequences attend to a selection of their keys.

    Its tensors are sent as one.
    """
    retrieval = slices.retrieval
    if retrieval is None:
        return None
    host = retrieval.host_keys
    tensors = [
        retrieval.seqs,
        retrieval.segments,
        retrieval.coded_end,
        retrieval.budgets,
        retrieval.summarised,
        retrieval.kept,
    ]
    if host is not None:
        tensors += [host.records, host.slots]
    packed = runtime.upload(torch.cat([each.flatten() for each in tensors]))
    parts = torch.split(packed, [each.numel() for each in tensors])
    if host is not None:
        records, slots = parts[6].view(host.records.shape), parts[7].view(host.slots.shape)
        host = host._replace(records=records, slots=slots)
    seqs, end, num_sinks = retrieval.seqs.numpy(), retrieval.coded_end.numpy(), retrieval.num_sinks
    selected = np.minimum(retrieval.budgets.numpy(), end - num_sinks)
    skipped = (retrieval.summarised - retrieval.kept).numpy()
    return retrieval._replace(
        seqs=parts[0],
        segments=parts[1].view(retrieval.segments.shape),
        coded_end=parts[2],
        budgets=parts[3],
        summarised=parts[4],
        kept=parts[5],
        host_keys=host,
        bounds=SearchBounds(
            rows=int(slices.counts[seqs].max()),
            segments=int((-(-end // SEGMENT_KEYS) - skipped).max()),
            budget=int(retrieval.budgets.max()),
            keys=int((slices.context_lens[seqs] - end + selected).max()) + num_sinks,
        ),
    )


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    """Return `values` [n] padded to [size] with `fill`."""
    if len(values) == size:
        return values
    padded = np.full(size, fill, dtype=values.dtype)
    padded[: len(values)] = values
    return padded


def _grown(query_start: np.ndarray, size: int) -> np.ndarray:
    """Return query_start i32[n + 1] extended to `size` sequences; the added ones have no rows."""
    return _padded(query_start, size + 1, int(query_start[-1]))


def _most_bytes(
    max_tokens: int, max_seqs: int, table_entries: int, num_groups: int, angle_bytes: int
) -> int:
    """Return a number of bytes in which the arrays of any step fit."""
    per_token = (5 + num_groups) * 8 + 2 * angle_bytes
    per_seq = 2 * 4
    others = MAX_MICRO_BATCHES * (8 + 4)
    num_arrays = 8 + (2 + num_groups) * MAX_MICRO_BATCHES
    return (
        max_tokens * per_token
        + max_seqs * per_seq
        + num_groups * table_entries * 4
        + others
        + num_arrays * ALIGNMENT
    )
