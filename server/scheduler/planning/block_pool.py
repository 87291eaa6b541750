"""The KV-cache blocks of one attention node: their owners, and cached prefixes to reuse.

Owns reference counts, the free list and the prefix cache (published blocks by content
hash; those without a holder are evicted in LRU order, on demand). Knows no requests and
no steps: the caller publishes a block only after the step that filled it has succeeded.
Called by attention_replica.py.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from topspin.messages import pack_ints

_HASH_BYTES = 32


def chain_root(salt: str) -> bytes:
    """Return the parent hash of a first block; different salts never share blocks."""
    return blake2b(salt.encode(), digest_size=_HASH_BYTES, person=b"topspin-salt").digest()


def chain_hash(parent: bytes, block_tokens: bytes) -> bytes:
    """Return the hash of a full block from its parent's hash and its packed token ids.

    blake2b, not Python's hash: a collision would give one request the cache of another.
    """
    return blake2b(parent + block_tokens, digest_size=_HASH_BYTES, person=b"topspin-kv").digest()


class HashChain:
    """The block hashes of one growing token sequence, each computed once."""

    def __init__(self, salt: str, block_size: int) -> None:
        self._block_size = block_size
        self._parent = chain_root(salt)
        self._hashes: list[bytes] = []

    def first(self, num_blocks: int, tokens: Sequence[int]) -> list[bytes]:
        """Return the hashes of the first `num_blocks` blocks of `tokens`, all of them full."""
        self._extend(num_blocks, tokens)
        return self._hashes[:num_blocks]

    def at(self, block_idx: int, tokens: Sequence[int]) -> bytes:
        """Return the hash of block `block_idx` of `tokens`, which is full."""
        self._extend(block_idx + 1, tokens)
        return self._hashes[block_idx]

    def _extend(self, num_blocks: int, tokens: Sequence[int]) -> None:
        size = self._block_size
        assert len(tokens) >= num_blocks * size
        for start in range(len(self._hashes) * size, num_blocks * size, size):
            self._parent = chain_hash(self._parent, pack_ints(tokens[start : start + size]))
            self._hashes.append(self._parent)


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1; none for a node that has never been there.

    Invariant: a block is free (no holder, no content worth keeping), cached (no holder,
    published) or held (one reference per holder, published or not).
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Return how many blocks acquire() could hand out now, evicting cached ones."""
        return len(self._free) + len(self._cached)

    def acquire(self, count: int) -> list[int]:
        """Take `count` blocks, free ones first, then the least recently used cached ones."""
        assert count <= self.num_available, f"{count} of {self.num_available} blocks"
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                del self._block_of[self._hash_of.pop(block)]
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of `blocks` (a sequence's table, in order)."""
        # Backwards: of a chain, the tail must be evicted first, since a block without its
        # parents can never be matched.
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is not held"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def find(self, block_hash: bytes) -> int | None:
        """Return the published block of a hash; takes no reference."""
        return self._block_of.get(block_hash)

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference to each of `blocks`, as found by find()."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make a held, full block findable; of equal blocks the first published is found."""
        assert self._references[block] > 0, f"block {block} is not held"
        if block_hash in self._block_of or block in self._hash_of:
            return
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash

    def unpublish(self, blocks: Sequence[int]) -> None:
        """Let nobody find these blocks any more; without a holder they are free."""
        for block in blocks:
            block_hash = self._hash_of.pop(block, None)
            if block_hash is None:
                continue
            del self._block_of[block_hash]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def count_idle(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` have no holder."""
        return sum(self._references[block] == 0 for block in blocks)

    def count_exclusive(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` only one sequence holds."""
        return sum(self._references[block] == 1 for block in blocks)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that `tables`, one per holder, free and cached blocks account for every block."""
        held: Counter[int] = Counter()
        for table in tables:
            assert len(set(table)) == len(table), f"a table names a block twice: {table}"
            held.update(table)
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        for block in range(self.num_blocks):
            assert self._references[block] == held[block], (
                f"block {block}: {self._references[block]} references, {held[block]} holders"
            )
        unheld = [block for block in range(self.num_blocks) if not held[block]]
        assert sorted([*self._free, *self._cached]) == unheld, "free and cached are not the rest"
        assert all(block in self._hash_of for block in self._cached)
        assert not any(block in self._hash_of for block in self._free)
        assert {h: b for b, h in self._hash_of.items()} == self._block_of
