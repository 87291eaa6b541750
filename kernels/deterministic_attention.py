"""Paged attention whose bits depend only on a query's keys and positions.

A query's keys are cut into chunks of CHUNK_KEYS by *absolute* position, attention is
computed per chunk, and the chunks are merged in order: a token in a prompt's chunk, a
decode step or a draft tree, with any other rows and any block size, has the same sums in
the same order. Every matrix product has UNIT_ROWS rows and one size. Knows no model; used
through `kernels.deterministic`.

Letters beside those of `kernels.contracts`: U units (query positions computed together),
P positions of a unit, M rows of a unit (position and query head of a group, padded), C
chunks, L = C * CHUNK_KEYS keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contracts import AttentionMeta, KeyCodes

CHUNK_KEYS: Final = 64
UNIT_ROWS: Final = 16
# Elements of one cache's gathered keys, in fp32, so that they stay in the processor's cache.
MAX_GROUP_ELEMENTS: Final = 1 << 20
# Stands for "no key seen": far below every score, and differences with it are finite.
_LOWEST: Final = -1e30

_Ints = npt.NDArray[np.int64]


class _UnitGroup(NamedTuple):
    """Units that are computed by one call."""

    rows: Tensor
    """i64[U * P], the query row at each position; any row where there is none."""
    kept: Tensor
    """i64, the entries of `rows` that are query rows."""
    targets: Tensor
    """i64, the query rows of those entries."""
    keys: Tensor
    """i64[U * C * G * CHUNK_KEYS], rows of the caches seen as [B * block_size * G, D]."""
    hidden: Tensor
    """bool[U, C, 1, M, CHUNK_KEYS], the keys that a row does not see."""


class _Units(NamedTuple):
    """All units of a micro-batch as arrays; positions are logical."""

    seq: _Ints
    """[U], the sequence of each unit."""
    rows: _Ints
    """[U, P], query rows, -1 where there is none."""
    positions: _Ints
    """[U, P], their positions, -1 where there is none."""


def positions_per_unit(repeat: int) -> int:
    """Return P for `repeat` query heads per key/value head."""
    return max(1, UNIT_ROWS // repeat)


def _ints(tensor: Tensor) -> _Ints:
    return tensor.numpy(force=True).astype(np.int64)


def _tree_lens(meta: AttentionMeta) -> _Ints:
    """Return the lengths [S] of the sequences' trees."""
    return np.diff(_ints(meta.query_start)) if meta.tree_lens is None else _ints(meta.tree_lens)


def _units(meta: AttentionMeta, per_unit: int) -> _Units:
    """Cut all query rows into units at multiples of P; a tree's rows are units of one."""
    starts, context = _ints(meta.query_start), _ints(meta.context_lens)
    counts = np.diff(starts)
    seq = np.repeat(np.arange(len(counts)), counts)
    row = np.arange(starts[-1])
    if meta.tree_mask is None:
        position = (context - counts - starts[:-1])[seq] + row
        first = np.ones(len(row), dtype=bool)
        same_seq = seq[1:] == seq[:-1]
        first[1:] = ~(same_seq & (position[1:] // per_unit == position[:-1] // per_unit))
    else:
        lengths, mask = _tree_lens(meta), meta.tree_mask[: len(row)].numpy(force=True)
        # Bits beyond a sequence's own columns are not of its tree.
        is_own = np.arange(mask.shape[1]) < lengths[seq][:, None]
        position = (context - lengths)[seq] - 1 + (mask & is_own).sum(-1)
        first = np.ones(len(row), dtype=bool)
    unit = np.cumsum(first) - 1
    num_units = int(first.sum())
    rows = np.full((num_units, per_unit), -1, dtype=np.int64)
    positions = rows.copy()
    rows[unit, position % per_unit] = row
    positions[unit, position % per_unit] = position
    return _Units(seq[first], rows, positions)


def _slots(
    meta: AttentionMeta, units: _Units, chosen: _Ints, keys: _Ints, *, block_size: int
) -> _Ints:
    """Return the cache slots of the logical key positions `keys` [len(chosen), L]."""
    places = keys
    if meta.tree_mask is not None:
        places = keys.copy()
        mask, lengths = meta.tree_mask.numpy(force=True), _tree_lens(meta)
        committed_lens = _ints(meta.context_lens) - lengths
        for idx, unit in enumerate(chosen.tolist()):
            seq = int(units.seq[unit])
            # The path by depth: logical position committed + d lies at committed + path[d].
            path = np.flatnonzero(mask[units.rows[unit].max(), : lengths[seq]])
            committed = int(committed_lens[seq])
            new = keys[idx] >= committed
            places[idx, new] = committed + path[keys[idx, new] - committed]
    tables = _ints(meta.block_tables)[units.seq[chosen]]
    blocks = np.take_along_axis(tables, places // block_size, axis=1)
    return cast("_Ints", blocks * block_size + places % block_size)


def _make_group(
    meta: AttentionMeta,
    units: _Units,
    chosen: _Ints,
    *,
    first_chunk: _Ints,
    num_chunks: int,
    block_size: int,
    num_groups: int,
    repeat: int,
    sliding_window: int | None,
) -> _UnitGroup:
    rows, positions = units.rows[chosen], units.positions[chosen]
    key_positions = first_chunk[:, None] * CHUNK_KEYS + np.arange(num_chunks * CHUNK_KEYS)
    last = positions.max(1, keepdims=True)
    slots = _slots(
        meta, units, chosen, np.minimum(key_positions, last), block_size=block_size
    ).reshape(len(chosen), num_chunks, 1, CHUNK_KEYS)
    keys = slots * num_groups + np.arange(num_groups)[:, None]
    distance = positions[:, :, None] - key_positions[:, None, :]
    seen = (distance >= 0) & (positions >= 0)[:, :, None]
    if sliding_window is not None:
        seen &= distance < sliding_window
    num_rows = -(-positions.shape[1] * repeat // UNIT_ROWS) * UNIT_ROWS
    hidden = np.ones((len(chosen), num_rows, key_positions.shape[1]), dtype=bool)
    hidden[:, : positions.shape[1] * repeat] = ~np.repeat(seen, repeat, axis=1)
    hidden = hidden.reshape(len(chosen), num_rows, num_chunks, CHUNK_KEYS).transpose(0, 2, 1, 3)
    flat = rows.reshape(-1)
    kept = np.flatnonzero(flat >= 0)
    return _UnitGroup(
        rows=torch.from_numpy(np.maximum(flat, 0)),
        kept=torch.from_numpy(kept),
        targets=torch.from_numpy(flat[kept]),
        keys=torch.from_numpy(keys.reshape(-1)),
        hidden=torch.from_numpy(np.ascontiguousarray(hidden[:, :, None])),
    )


def _groups(
    meta: AttentionMeta,
    *,
    block_size: int,
    num_groups: int,
    head_dim: int,
    repeat: int,
    sliding_window: int | None,
) -> Iterator[_UnitGroup]:
    """Join units of similar numbers of chunks; bounds the keys gathered at once."""
    units = _units(meta, positions_per_unit(repeat))
    if not len(units.seq):
        return
    last = units.positions.max(1)
    first_key = np.zeros_like(last)
    if sliding_window is not None:
        lowest = np.where(units.positions < 0, last[:, None], units.positions).min(1)
        first_key = np.maximum(lowest - sliding_window + 1, 0)
    first_chunk = first_key // CHUNK_KEYS
    num_chunks = last // CHUNK_KEYS - first_chunk + 1
    order = np.argsort(-num_chunks, kind="stable")
    begin = 0
    while begin < len(order):
        most = int(num_chunks[order[begin]])
        room = max(1, MAX_GROUP_ELEMENTS // (most * CHUNK_KEYS * num_groups * head_dim))
        # Units of less than half as many chunks would be mostly padding.
        similar = int((num_chunks[order[begin:]] * 2 >= most).sum())
        end = begin + min(room, similar)
        chosen = np.sort(order[begin:end])
        yield _make_group(
            meta,
            units,
            chosen,
            first_chunk=first_chunk[chosen],
            num_chunks=most,
            block_size=block_size,
            num_groups=num_groups,
            repeat=repeat,
            sliding_window=sliding_window,
        )
        begin = end


def _plan(
    meta: AttentionMeta, q: Tensor, k_cache: Tensor, sliding_window: int | None
) -> tuple[_UnitGroup, ...]:
    """Return the groups of this micro-batch; the first layer's call makes them."""
    _, block_size, num_groups, head_dim = k_cache.shape
    repeat = q.shape[1] // num_groups
    memo_key = ("deterministic", block_size, num_groups, head_dim, repeat, sliding_window)
    if memo_key not in meta.memo:
        meta.memo[memo_key] = tuple(
            _groups(
                meta,
                block_size=block_size,
                num_groups=num_groups,
                head_dim=head_dim,
                repeat=repeat,
                sliding_window=sliding_window,
            )
        )
    return cast("tuple[_UnitGroup, ...]", meta.memo[memo_key])


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor,
    *,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend q [U, P, N, D] to keys and values [U * C * G, CHUNK_KEYS, D or V], all fp32.

    Returns [U, P, N, D or V]; rows that see no key are NaN.
    """
    num_units, per_unit, num_heads, head_dim = q.shape
    num_chunks, num_rows = hidden.shape[1], hidden.shape[3]
    num_groups = keys.shape[0] // (num_units * num_chunks)
    repeat = num_heads // num_groups
    used = per_unit * repeat
    folded = q.view(num_units, per_unit, num_groups, repeat, head_dim).transpose(1, 2)
    queries = q.new_zeros(num_units, num_chunks, num_groups, num_rows, head_dim)
    queries[..., :used, :] = folded.reshape(num_units, 1, num_groups, used, head_dim)
    scores = torch.bmm(queries.view(-1, num_rows, head_dim), keys.transpose(1, 2))
    shape = (num_units, num_chunks, num_groups, num_rows)
    scores = scores.view(*shape, CHUNK_KEYS).mul_(scale).masked_fill_(hidden, float("-inf"))
    highest = scores.amax(-1, keepdim=True).clamp_(min=_LOWEST)
    scores.sub_(highest).exp_()
    mass = scores.sum(-1, keepdim=True)
    summed = torch.bmm(scores.view(-1, num_rows, CHUNK_KEYS), values).view(*shape, -1)
    # Chunks that a row does not see weigh exactly 0, so adding them changes no bit.
    peak = highest.amax(1, keepdim=True)
    weight = (highest - peak).exp_()
    mass.mul_(weight)
    summed.mul_(weight)
    total, total_mass = summed[:, 0], mass[:, 0]
    for chunk in range(1, num_chunks):
        total.add_(summed[:, chunk])
        total_mass.add_(mass[:, chunk])
    if sinks is not None:
        own = sinks.view(num_groups, 1, repeat).expand(-1, per_unit, -1).reshape(num_groups, used)
        total_mass[:, :, :used].add_((own[..., None] - peak[:, 0, :, :used]).exp_())
    result = total.div_(total_mass)[:, :, :used]
    result = result.reshape(num_units, num_groups, per_unit, repeat, -1).transpose(1, 2)
    return result.reshape(num_units, per_unit, num_heads, -1)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    codes: KeyCodes | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend to the cached positions; see `kernels.reference.paged_attention`.

    Raises ValueError for sequences that select their keys: all rows of a step decide which.
    """
    if codes is not None and meta.retrieval is not None:
        raise ValueError("deterministic kernels attend to all keys")
    if out is None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
    out[int(meta.query_start[-1]) :] = 0
    num_heads, head_dim = q.shape[1:]
    repeat = num_heads // k_cache.shape[2]
    per_unit = positions_per_unit(repeat)
    k_rows, v_rows = (cache.view(-1, cache.shape[3]) for cache in (k_cache, v_cache))
    for group in _plan(meta, q, k_cache, sliding_window):
        result = _attend(
            q.index_select(0, group.rows).float().view(-1, per_unit, num_heads, head_dim),
            k_rows.index_select(0, group.keys).float().view(-1, CHUNK_KEYS, head_dim),
            v_rows.index_select(0, group.keys).float().view(-1, CHUNK_KEYS, v_rows.shape[1]),
            group.hidden,
            scale=scale,
            sinks=sinks,
        )
        chosen = result.flatten(0, 1).index_select(0, group.kept)
        out.index_copy_(0, group.targets, chosen.to(out.dtype))
    return out
