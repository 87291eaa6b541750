"""Counters of retrieval from the KV cache; part of results and of statistics."""

from __future__ import annotations

import msgspec


class KvCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Retrieval from the KV cache, and its spill, in one step or since the start.

    `num_selected_rows` counts rows, by layer, that attended to a selection of their keys,
    `num_coded_segments` the segments whose codebooks were learnt. `num_saved_blocks` were written
    to the spill's file, `num_loaded_blocks` read from it whole; of selected keys in the file
    `num_hot_keys` had a copy in memory and `num_read_keys` were read. `recall_sum` is the sum of
    `num_recalls` shares of the best keys that were selected.
    """

    num_selected_rows: int = 0
    num_coded_segments: int = 0
    num_saved_blocks: int = 0
    num_loaded_blocks: int = 0
    num_hot_keys: int = 0
    num_read_keys: int = 0
    recall_sum: float = 0.0
    num_recalls: int = 0

    def __add__(self, other: KvCounts) -> KvCounts:
        return KvCounts(
            **{each: getattr(self, each) + getattr(other, each) for each in self.__struct_fields__}
        )
