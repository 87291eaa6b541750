"""The sequence table: admission, growth, and refusal of plans that contradict it."""

from __future__ import annotations

import numpy as np
import pytest

from attention_nodes.step.sequences import PENDING, SequenceTable, TableLimits, unpack
from tests.attention_nodes.plans import new_sequence
from topspin.errors import ProtocolError
from topspin.messages import NewSequence, SamplingParams, pack_ints
from topspin.plan.kv_cache import NO_BLOCK

LIMITS = TableLimits(max_len=32, block_size=4, num_blocks=10, vocab_size=100)
SAMPLING = SamplingParams(max_tokens=4, seed=1)


def sequence(seq_id: int = 1, **changes: object) -> NewSequence:
    fields = {"blocks": pack_ints([3, 4]), "max_length": 20, "sampling": SAMPLING, **changes}
    return new_sequence(seq_id, [5, 6, 7, 8, 9], **fields)


def rows(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_sequence_advances_through_prompt_and_sampled_tokens() -> None:
    table = SequenceTable(LIMITS)
    table.admit(sequence())
    row = table.rows_of(rows(1))
    table.check_advance(row, rows(5))
    table.commit(row, rows(5))
    table.fill(table.reserve(row), rows(42))
    table.check_advance(row, rows(1))
    assert table.tokens[row[0], :6].tolist() == [5, 6, 7, 8, 9, 42]
    assert table.sampling(int(row[0])) == SAMPLING


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": b""}, "0 tokens"),
        ({"tokens": b"123"}, "3 bytes"),
        ({"tokens": pack_ints([1] * 33)}, "33 tokens"),
        ({"tokens": pack_ints([1, 100]), "num_prompt_tokens": 2}, "vocabulary"),
        ({"tokens": pack_ints([1, -1]), "num_prompt_tokens": 2}, "vocabulary"),
        ({"num_prompt_tokens": 6}, "6 of them"),
        ({"num_prompt_tokens": 0}, "0 of them"),
        ({"max_length": 4}, "more than its 4"),
        ({"num_computed": 5}, "5 of 5"),
        ({"num_computed": -1}, "-1 of 5"),
        ({"blocks": pack_ints([10])}, "outside the cache"),
        ({"blocks": pack_ints(range(9))}, "9 blocks"),
    ],
)
def test_bad_sequences_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        SequenceTable(LIMITS).admit(sequence(**changes))


def test_unknown_and_repeated_ids_are_refused() -> None:
    table = SequenceTable(LIMITS)
    table.admit(sequence(7))
    with pytest.raises(ProtocolError, match="7 was admitted already"):
        table.admit(sequence(7))
    with pytest.raises(ProtocolError, match="8 is not on this node"):
        table.rows_of(rows(8))
    with pytest.raises(ProtocolError, match="8 is finished"):
        table.forget(8)


@pytest.mark.parametrize(
    ("advance", "reason"), [(6, "tokens that are known"), (0, "less than one")]
)
def test_impossible_advances_are_refused(advance: int, reason: str) -> None:
    table = SequenceTable(LIMITS)
    table.admit(sequence())
    with pytest.raises(ProtocolError, match=reason):
        table.check_advance(table.rows_of(rows(1)), rows(advance))


def test_an_advance_past_the_blocks_is_refused() -> None:
    table = SequenceTable(LIMITS)
    table.admit(sequence(blocks=pack_ints([3])))
    with pytest.raises(ProtocolError, match="past the blocks"):
        table.check_advance(table.rows_of(rows(1)), rows(5))


def test_sampling_before_the_end_of_the_prompt_is_refused() -> None:
    table = SequenceTable(LIMITS)
    table.admit(sequence())
    row = table.rows_of(rows(1))
    table.commit(row, rows(3))
    with pytest.raises(ProtocolError, match="before the end of a prompt"):
        table.reserve(row)


def test_a_token_under_way_is_pending_until_it_comes() -> None:
    table = SequenceTable(LIMITS)
    table.admit(sequence())
    row = table.rows_of(rows(1))
    table.commit(row, rows(5))
    reserved = table.reserve(row)
    assert table.has_pending(row)
    assert table.tokens[row, 5] == PENDING
    table.check_advance(row, rows(1))  # the next step may continue from it
    table.fill(reserved, rows(42))
    assert not table.has_pending(row)
    assert table.tokens[row, 5] == 42


def test_a_token_that_comes_late_does_not_reach_the_rows_next_tenant() -> None:
    table = SequenceTable(LIMITS)
    table.admit(sequence(1))
    table.admit(sequence(2))
    both = table.rows_of(rows(1, 2))
    table.commit(both, rows(5, 5))
    reserved = table.reserve(both)
    table.forget(1)
    table.admit(sequence(3, tokens=pack_ints([7] * 6), num_prompt_tokens=6))
    assert table.rows_of(rows(3)) == both[0]
    table.fill(reserved, rows(41, 42))
    assert table.tokens[both, 5].tolist() == [7, 42]


def test_each_group_of_layers_has_a_table() -> None:
    """Blocks come side by side; those behind a window are none, and never read."""
    table = SequenceTable(LIMITS._replace(num_groups=2))
    table.admit(sequence(1, blocks=pack_ints([3, NO_BLOCK, 4, 5])))
    assert table.block_tables[table.rows_of(rows(1))[0], :, :2].tolist() == [[3, 4], [0, 5]]
    size = LIMITS.block_size
    assert table.slots(int(table.rows_of(rows(1))[0]), rows(0, size + 1)).tolist() == [
        [3 * size, 4 * size + 1],
        [0, 5 * size + 1],
    ]
    with pytest.raises(ProtocolError, match="1 blocks for 2 groups"):
        table.add_blocks(0, rows(1))
    with pytest.raises(ProtocolError, match="outside the cache"):
        table.add_blocks(0, rows(1, NO_BLOCK - 1))


def test_rows_are_reused_and_the_table_grows() -> None:
    table = SequenceTable(LIMITS, capacity=2)
    for seq_id in range(5):
        table.admit(sequence(seq_id, tokens=pack_ints([seq_id + 1, 2]), num_prompt_tokens=2))
    found = table.rows_of(rows(*range(5)))
    assert sorted(found.tolist()) == [0, 1, 2, 3, 4]
    assert table.tokens[found, 0].tolist() == [1, 2, 3, 4, 5]
    assert table.block_tables[found, 0, 1].tolist() == [4] * 5
    table.forget(2)
    table.admit(sequence(9, tokens=pack_ints([77]), num_prompt_tokens=1, blocks=b""))
    reused = table.rows_of(rows(9))
    assert reused[0] == found[2]
    assert table.num_blocks[reused[0]] == 0
    table.clear()
    assert len(table) == 0


def test_unpack_is_little_endian_int32() -> None:
    assert unpack(b"\x01\x00\x00\x00\xff\xff\xff\xff", what="x").tolist() == [1, -1]
