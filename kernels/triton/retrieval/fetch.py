"""Selected keys that are in the host's memory: copied to the cache, and listed there.

The device reads them over its bus where they lie, in rows of one key and its value; nothing is kept
from one step for the next. Called by `kernels.triton.attention.launches` behind the search. Letters
as in `kernels.contracts`.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from kernels.contracts import AttentionMeta, KeyCodes

# Keys of a program; not measured.
KEYS: Final = 16


def fetch_selected(
    k_cache: Tensor, v_cache: Tensor, codes: KeyCodes, meta: AttentionMeta, selecting: AttentionMeta
) -> None:
    """Copy what `selecting`, of select_slots(), lists as in the host's memory; list the copies.

    Raises ValueError for caches and records that do not fit together.
    """
    retrieval = meta.retrieval
    assert retrieval is not None
    host = retrieval.host_keys
    if host is None:
        return
    _, block_size, num_groups, head_dim = k_cache.shape
    shape = (num_groups, block_size, 2, head_dim)
    if host.memory.shape[2:] != shape or host.memory.dtype != k_cache.dtype:
        raise ValueError(f"records {tuple(host.memory.shape)} for caches {tuple(k_cache.shape)}")
    if not all(each.is_contiguous() for each in (k_cache, v_cache, host.memory)):
        raise ValueError("caches and records must be contiguous")
    lists, most = selecting.block_tables, host.slots.shape[1]
    fetch_keys[(num_groups, len(host.slots), triton.cdiv(most, KEYS))](
        lists, retrieval.seqs, retrieval.coded_end, retrieval.budgets, host.records, host.slots,
        host.memory, k_cache, v_cache, host.cache_layers[codes.layer], retrieval.num_sinks,
        lists.stride(1), host.records.stride(0), host.slots.stride(0), host.memory.stride(0),
        BLOCK_SIZE=block_size, DIM=head_dim, BLOCK=KEYS,
        BLOCK_D=max(triton.next_power_of_2(head_dim), 16), num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["layer", "num_sinks", "lists_row", "records_row", "slots_row"],
    do_not_specialize_on_alignment=["seqs", "coded_end", "budgets", "records", "slots"],
)
def fetch_keys(
    lists: tl.tensor, seqs: tl.tensor, coded_end: tl.tensor, budgets: tl.tensor,
    records: tl.tensor, slots: tl.tensor, memory: tl.tensor, k_cache: tl.tensor,
    v_cache: tl.tensor, layer: tl.tensor, num_sinks: tl.tensor, lists_row: tl.tensor,
    records_row: tl.tensor, slots_row: tl.tensor, record_size: tl.tensor,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the selected keys that lists i32[S, G, lists_row] has as -1 - k, and list their copies.

    Grid (G, R, slots_row / BLOCK). The n-th selected key of a head goes to the n-th slot.
    """
    kv_head, seq = tl.program_id(0), tl.program_id(1)
    rank = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    count = tl.minimum(tl.load(budgets + seq), tl.load(coded_end + seq) - num_sinks)
    own = tl.load(seqs + seq).to(tl.int64) * tl.num_programs(0) + kv_head
    place = lists + own * lists_row + num_sinks + rank
    listed = tl.load(place, mask=rank < count, other=0)
    is_away = listed < 0
    key = tl.where(is_away, -1 - listed, 0)
    record = tl.load(
        records + seq.to(tl.int64) * records_row + key // BLOCK_SIZE, mask=is_away, other=0
    )
    row = (layer * tl.num_programs(0) + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
    source = record.to(tl.int64) * record_size + row * 2 * DIM
    slot = tl.load(slots + seq.to(tl.int64) * slots_row + rank, mask=is_away, other=0)
    target = (slot.to(tl.int64) * tl.num_programs(0) + kv_head) * DIM
    column = tl.arange(0, BLOCK_D)
    mask = is_away[:, None] & (column < DIM)[None, :]
    found = tl.load(memory + source[:, None] + column[None, :], mask=mask)
    tl.store(k_cache + target[:, None] + column[None, :], found, mask=mask)
    found = tl.load(memory + source[:, None] + DIM + column[None, :], mask=mask)
    tl.store(v_cache + target[:, None] + column[None, :], found, mask=mask)
    tl.store(place, slot, mask=is_away)
