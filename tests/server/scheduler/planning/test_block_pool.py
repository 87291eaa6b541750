"""Reference counts, eviction order, content hashes and the integrity check itself."""

from __future__ import annotations

from array import array

import pytest

from server.scheduler.planning.block_pool import BlockPool, HashChain, chain_hash, chain_root
from server.scheduler.planning.block_tables import BlockTables
from topspin.plan.kv_cache import BlockNeeds


def published(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """Fill a block per hash, publish them as one chain, and release them."""
    blocks = pool.acquire(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.release(blocks)
    return blocks


def test_match_stops_at_the_first_unknown_block() -> None:
    pool = BlockPool(4)
    first, second, third = published(pool, [b"a", b"b", b"c"])
    tables = BlockTables(pool, BlockNeeds(block_size=1, max_step_tokens=1))
    assert tables.find_prefix([b"a", b"b", b"c", b"d"]) == [first, second, third]
    assert tables.find_prefix([b"a", b"x", b"c"]) == [first]
    assert tables.find_prefix([b"x", b"b"]) == []


def test_shared_block_returns_with_its_last_holder() -> None:
    pool = BlockPool(2)
    (block,) = published(pool, [b"a"])
    pool.share([block])
    pool.share([block])
    assert pool.count_idle([block]) == 0
    assert pool.count_exclusive([block]) == 0
    pool.check_integrity([[block], [block]])
    pool.release([block])
    assert pool.count_exclusive([block]) == 1
    assert pool.num_available == 1
    pool.release([block])
    assert pool.count_idle([block]) == 1
    assert pool.num_available == 2


def test_free_blocks_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(4)
    (old,) = published(pool, [b"old"])
    (new,) = published(pool, [b"new"])
    pool.share([old])
    pool.release([old])  # used again: now the most recently used
    taken = pool.acquire(2)
    assert not {old, new} & set(taken)
    assert pool.acquire(1) == [new]
    assert pool.find(b"new") is None
    assert pool.find(b"old") == old
    assert pool.acquire(1) == [old]


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    head, middle, tail = published(pool, [b"1", b"2", b"3"])
    assert [pool.acquire(1) for _ in range(3)] == [[tail], [middle], [head]]


def test_a_content_keeps_its_first_block() -> None:
    pool = BlockPool(2)
    first, second = pool.acquire(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    pool.release([first, second])
    assert pool.find(b"a") == first
    pool.check_integrity([])


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[0, 0]], [[1]]])
def test_integrity_check_sees_wrong_owners(tables: list[list[int]]) -> None:
    pool = BlockPool(2)
    assert pool.acquire(1) == [0]
    pool.check_integrity([[0]])
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


def test_hash_depends_on_tokens_position_and_salt() -> None:
    tokens = array("i", [1, 2, 1, 2, 3])
    chain = HashChain("a", 2)
    first, second = chain.first(2, tokens)
    assert first != second  # same tokens, another prefix
    assert chain.at(1, tokens) == second
    assert HashChain("a", 2).first(2, tokens) == [first, second]
    assert HashChain("b", 2).first(1, tokens) != [first]
    assert HashChain("a", 2).first(1, array("i", [1, 3])) != [first]
    assert first == chain_hash(chain_root("a"), b"\1\0\0\0\2\0\0\0")


def test_hashes_of_a_growing_sequence_equal_those_of_the_grown_one() -> None:
    tokens = array("i", range(20))
    grown = HashChain("", 4)
    for count in range(1, 6):
        grown.at(count - 1, tokens[: 4 * count])
    assert grown.first(5, tokens) == HashChain("", 4).first(5, tokens)
