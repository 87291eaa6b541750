"""The layout of live trees: what is moved, and that it is little along the best path."""

from __future__ import annotations

from draft_nodes.kv_layout import KvLayout
from spec_decode.draft import ROOT
from spec_decode.forest import Kept, PassRows


def fed(num_tokens: int) -> KvLayout:
    """Return a layout in blocks of two whose sequence 5 has verified tokens, from slot 0 on."""
    layout = KvLayout(num_blocks=20, block_size=2)
    layout.open(5, num_prompt=num_tokens)
    assert layout.reserve(5, num_tokens)
    layout.place([PassRows(5, (7,) * num_tokens, tuple(range(-1, num_tokens - 1)), 1)])
    layout.keep([Kept(5, tuple(range(num_tokens)), ())])
    return layout


def grow(layout: KvLayout, *parents: int) -> None:
    assert layout.reserve(5, len(parents))
    layout.place([PassRows(5, (1,) * len(parents), parents, len(parents))])


def test_nothing_moves_when_the_first_path_is_verified() -> None:
    layout = fed(3)
    grow(layout, ROOT, 0, 1, 1)
    sources, targets = layout.keep([Kept(5, (0, 1), (2, 3))])
    assert not len(sources)
    assert not len(targets)
    assert layout.slots_of(5).tolist() == [0, 1, 2, 3, 4]


def test_survivors_of_another_branch_move_behind_the_prefix_in_overlapping_ranges() -> None:
    layout = fed(3)
    grow(layout, ROOT, ROOT, 1, 1, 0, 2)
    sources, targets = layout.keep([Kept(5, (1, 2), (5,))])
    assert sources.tolist() == [4, 5, 8]
    assert targets.tolist() == [3, 4, 5]
    # The survivor follows the end of the prefix; a new row follows it.
    placed_at = layout.place([PassRows(5, (9,), (0,), 1)])
    assert placed_at.positions.tolist() == [6]
    assert placed_at.kv_slots.tolist() == [6]
    assert placed_at.tree_mask is None, "a chain needs no mask"


def test_masks_cover_the_rows_in_the_cache_and_the_new_ones() -> None:
    layout = fed(3)
    grow(layout, ROOT, ROOT, 1)
    assert layout.reserve(5, 2)
    placed = layout.place([PassRows(5, (9, 8), (0, 2), 2)])
    assert placed.tree_lens is not None
    assert placed.tree_mask is not None
    assert placed.tree_lens.tolist() == [5]
    assert placed.tree_mask.astype(int).tolist() == [[1, 0, 0, 1, 0], [0, 1, 1, 0, 1]]
    assert placed.positions.tolist() == [4, 5]
    assert placed.context_lens.tolist() == [8]
