"""The cutting of query rows' keys into pieces."""

from __future__ import annotations

import pytest

from kernels.cpu.attention_rows import SPLIT_KEYS, Row, plan_work
from tests.kernels.cases.matrices import values_then_pairs


@pytest.mark.parametrize(
    ("num_keys", "key_start"),
    values_then_pairs([1, 64, 65, 160, 700, 1024, 1025, 5121, 9000], [0, 37]),
)
def test_pieces_are_nearly_equal_and_cover_each_key_once(num_keys: int, key_start: int) -> None:
    key_end = key_start + num_keys
    work = plan_work([Row(3, 1, key_start, key_end)])
    pieces = sorted(work.pieces.tolist(), key=lambda piece: piece[2])
    assert {(row, seq_idx) for row, seq_idx, *_ in pieces} == {(3, 1)}
    assert [piece[2] for piece in pieces] == [key_start, *(piece[3] for piece in pieces[:-1])]
    assert pieces[-1][3] == key_end
    sizes = [piece[3] - piece[2] for piece in pieces]
    assert 0 < max(sizes) <= SPLIT_KEYS
    if num_keys <= 64:
        assert len(sizes) == 1
        return
    # Two threads have as much to do.
    assert len(sizes) == 2 * -(-num_keys // (2 * SPLIT_KEYS))
    assert sum(sizes[::2]) - sum(sizes[1::2]) <= 16 * len(sizes)


def test_pieces_depend_on_their_own_row_only_and_long_ones_come_first() -> None:
    rows = [Row(0, 0, 0, 5), Row(1, 1, 0, 900), Row(2, 2, 100, 300)]
    work = plan_work(rows)
    lengths = [piece[3] - piece[2] for piece in work.pieces.tolist()]
    assert lengths == sorted(lengths, reverse=True)
    for row in rows:
        alone = [piece[:4] for piece in plan_work([row]).pieces.tolist()]
        together = [piece[:4] for piece in work.pieces.tolist() if piece[0] == row.row]
        assert sorted(together) == sorted(alone)
    parts = sorted(piece[4] for piece in work.pieces.tolist() if piece[4] >= 0)
    assert parts == list(range(work.num_parts))
    assert work.merges.tolist() == [[1, 0, 2], [2, 2, 2]]


def test_the_last_keys_of_a_branch_have_positions_of_their_own() -> None:
    """Each key of each row, by all pieces together; a branch changes no cut."""
    rows = [Row(0, 0, 0, 40), Row(1, 0, 37, 140, (136, 139, 150)), Row(2, 3, 2, 3, (7, 9, 11))]
    work = plan_work(rows)
    branches = work.branches.tolist()
    for row in rows:
        own = sorted(piece for piece in work.pieces.tolist() if piece[0] == row.row)
        positions = [
            branches[at + key] if key >= listed else key
            for _, _, start, stop, _, listed, at in own
            for key in range(start, stop)
        ]
        every = [*range(row.key_end - len(row.branch)), *row.branch]
        assert positions == every[row.key_start : row.key_end]
        plain = plan_work([row._replace(branch=())]).pieces.tolist()
        assert [piece[:4] for piece in own] == [piece[:4] for piece in sorted(plain)]
