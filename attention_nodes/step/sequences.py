"""An attention node's state of each sequence between steps.

Owns, per admitted sequence, its tokens, how many of them are in the KV cache, its block
table and its sampling parameters, in arrays indexed by a row so that a micro-batch is
assembled without a loop over tokens. Knows no tensors, no weights and no scheduling: it
follows plans and refuses, by ProtocolError, plans that contradict its state.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from topspin.errors import ProtocolError
from topspin.messages import NewSequence, SamplingParams
from topspin.plan.kv_cache import NO_BLOCK

IntArray = npt.NDArray[np.int64]

REALS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""The sampling parameters in a row of SequenceTable.reals."""

PENDING: Final = -1
"""In SequenceTable.tokens: a token that is sampled but not copied from the device yet."""


class TableLimits(NamedTuple):
    """Bounds of the ids in a plan."""

    max_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    num_groups: int = 1


class Reserved(NamedTuple):
    """The places for the tokens of a step under way; see SequenceTable.reserve."""

    rows: IntArray
    positions: IntArray
    tenancy: IntArray


def unpack(data: bytes, *, what: str) -> IntArray:
    """Return packed int32 `data` as int64; raises ProtocolError if its size is odd."""
    if len(data) % 4:
        raise ProtocolError(f"{what}: {len(data)} bytes are no int32 array")
    return np.frombuffer(data, dtype="<i4").astype(np.int64)


class SequenceTable:
    """All sequences that the scheduler has admitted to this node.

    Invariant: positions below `num_committed[row]` are in the cache, or will be before a later
    step reads them; `tokens[row]` has `num_known[row]` tokens, the last of which may be PENDING;
    num_committed < num_known between steps unless a prompt is still being prefilled. A row of
    `block_tables` has a table for each group of layers, all of `num_blocks[row]` entries. Rows are
    reused (`tenancy` counts the sequences that used a row); arrays grow by doubling. The big
    arrays take no memory until they are written.
    """

    def __init__(self, limits: TableLimits, *, capacity: int = 64) -> None:
        self.limits = limits
        self._max_blocks = -(-limits.max_len // limits.block_size)
        self._row_of: dict[int, int] = {}
        self._free_rows = list(range(capacity - 1, -1, -1))
        self.tokens = np.zeros((capacity, limits.max_len + 1), dtype=np.int32)
        self.block_tables = np.zeros(
            (capacity, limits.num_groups, self._max_blocks), dtype=np.int32
        )
        self.num_known = np.zeros(capacity, dtype=np.int64)
        self.num_committed = np.zeros(capacity, dtype=np.int64)
        self.num_prompt = np.zeros(capacity, dtype=np.int64)
        self.max_length = np.zeros(capacity, dtype=np.int64)
        self.num_blocks = np.zeros(capacity, dtype=np.int64)
        self.tenancy = np.zeros(capacity, dtype=np.int64)
        # Of each sequence's sampling parameters the numbers: REALS; seed (signed), choice, top_k.
        self.reals = np.zeros((capacity, len(REALS)), dtype=np.float32)
        self.keys = np.zeros((capacity, 3), dtype=np.int64)
        self.is_plain = np.zeros(capacity, dtype=bool)
        self._sampling: list[SamplingParams | None] = [None] * capacity
        self._salts = [""] * capacity
        self._request_ids = [""] * capacity
        self.seq_id_of = np.zeros(capacity, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._row_of)

    def admit(self, new: NewSequence) -> None:
        """Add a sequence whose id is not in the table."""
        if new.seq_id in self._row_of:
            raise ProtocolError(f"sequence {new.seq_id} was admitted already")
        tokens = unpack(new.tokens, what=f"sequence {new.seq_id}: tokens")
        if not 0 < new.num_prompt_tokens <= len(tokens) <= self.limits.max_len:
            raise ProtocolError(
                f"sequence {new.seq_id}: {len(tokens)} tokens, {new.num_prompt_tokens} of them "
                f"prompt, where 1 to {self.limits.max_len} are possible"
            )
        if new.max_length < len(tokens):
            raise ProtocolError(
                f"sequence {new.seq_id}: {len(tokens)} tokens, more than its {new.max_length}"
            )
        if not 0 <= new.num_computed < len(tokens):
            raise ProtocolError(
                f"sequence {new.seq_id}: {new.num_computed} of {len(tokens)} tokens computed"
            )
        if tokens.min() < 0 or tokens.max() >= self.limits.vocab_size:
            raise ProtocolError(f"sequence {new.seq_id}: a token id is outside the vocabulary")
        row = self._take_row()
        self._row_of[new.seq_id] = row
        self.seq_id_of[row] = new.seq_id
        self.tokens[row, : len(tokens)] = tokens
        self.num_known[row] = len(tokens)
        self.num_committed[row] = new.num_computed
        self.num_prompt[row] = new.num_prompt_tokens
        self.max_length[row] = min(new.max_length, self.limits.max_len + 1)
        self.num_blocks[row] = 0
        params = self._sampling[row] = new.sampling
        self._salts[row] = new.cache_salt
        self._request_ids[row] = new.request_id
        self.reals[row] = [getattr(params, each) for each in REALS]
        seed = np.uint64(params.seed).view(np.int64)
        self.keys[row] = seed, params.choice, params.top_k
        self.is_plain[row] = params.is_plain
        self.add_blocks(row, unpack(new.blocks, what=f"sequence {new.seq_id}: blocks"))

    def _take_row(self) -> int:
        if not self._free_rows:
            capacity = len(self.num_known)
            for name in (
                "tokens",
                "block_tables",
                "num_known",
                "num_committed",
                "num_prompt",
                "max_length",
                "num_blocks",
                "seq_id_of",
                "tenancy",
                "reals",
                "keys",
                "is_plain",
            ):
                old = getattr(self, name)
                grown = np.zeros((2 * capacity, *old.shape[1:]), dtype=old.dtype)
                grown[:capacity] = old
                setattr(self, name, grown)
            self._sampling += [None] * capacity
            self._salts += [""] * capacity
            self._request_ids += [""] * capacity
            self._free_rows = list(range(2 * capacity - 1, capacity - 1, -1))
        return self._free_rows.pop()

    def forget(self, seq_id: int) -> None:
        """Drop a sequence; its blocks belong to the scheduler and may be reused."""
        row = self._row_of.pop(seq_id, None)
        if row is None:
            raise ProtocolError(f"sequence {seq_id} is finished but was never admitted")
        self._sampling[row] = None
        self.tenancy[row] += 1
        self._free_rows.append(row)

    def request_of(self, seq_id: int) -> str | None:
        """Return the id of the client's request; None if the sequence was dropped meanwhile."""
        row = self._row_of.get(seq_id)
        return None if row is None else self._request_ids[row]

    @property
    def seq_ids(self) -> list[int]:
        """Return the ids of all sequences."""
        return list(self._row_of)

    def clear(self) -> None:
        """Forget every sequence (the start of a new generation)."""
        for seq_id in self.seq_ids:
            self.forget(seq_id)

    def rows_of(self, seq_ids: IntArray) -> IntArray:
        """Return the rows of `seq_ids`; raises ProtocolError for an unknown one."""
        try:
            return np.array([self._row_of[seq_id] for seq_id in seq_ids.tolist()], dtype=np.int64)
        except KeyError as error:
            raise ProtocolError(f"sequence {error.args[0]} is not on this node") from None

    def add_blocks(self, row: int, blocks: IntArray) -> None:
        """Append cache blocks to the tables of `row`: one of each group, side by side.

        NO_BLOCK is possible where no query sees the positions any more.
        """
        held, num_groups = int(self.num_blocks[row]), self.limits.num_groups
        if len(blocks) % num_groups:
            raise ProtocolError(f"{len(blocks)} blocks for {num_groups} groups of layers")
        end = held + len(blocks) // num_groups
        if end > self._max_blocks:
            raise ProtocolError(f"{end} blocks exceed the longest sequence")
        if len(blocks) and (blocks.min() < NO_BLOCK or blocks.max() >= self.limits.num_blocks):
            raise ProtocolError("a block id is outside the cache")
        # Some kernels read whatever is behind a window, though it counts for nothing.
        readable = np.maximum(blocks, 0).reshape(-1, num_groups)
        self.block_tables[row, :, held:end] = readable.T
        self.num_blocks[row] = end

    def check_advance(self, rows: IntArray, counts: IntArray) -> None:
        """Raise ProtocolError unless each row can advance by `counts` known, covered tokens."""
        ends = self.num_committed[rows] + counts
        if (counts < 1).any():
            raise ProtocolError("a slice advances by less than one position")
        if (ends > self.num_known[rows]).any():
            raise ProtocolError("a slice goes past the tokens that are known")
        if (ends > self.num_blocks[rows] * self.limits.block_size).any():
            raise ProtocolError("a slice goes past the blocks of its sequence")

    def check_reserved(self, rows: IntArray, counts: IntArray, max_draft: IntArray) -> None:
        """Raise ProtocolError unless drafts behind `counts` positions have slots reserved."""
        ends = self.num_committed[rows] + counts
        ends = np.maximum(ends, np.minimum(ends + max_draft, self.max_length[rows] - 1))
        if (ends > self.num_blocks[rows] * self.limits.block_size).any():
            raise ProtocolError("a draft goes past the blocks of its sequence")

    def commit(self, rows: IntArray, counts: IntArray) -> None:
        """Record that the next `counts` positions of `rows` are in the cache."""
        self.num_committed[rows] += counts

    def reserve(self, rows: IntArray) -> Reserved:
        """Append a place for the token that is being sampled for each row.

        Its position counts as known from now on; its value is PENDING until fill().
        """
        if (self.num_known[rows] != self.num_committed[rows]).any():
            raise ProtocolError("a token was sampled before the end of a prompt")
        reserved = Reserved(rows, self.num_known[rows], self.tenancy[rows])
        self.tokens[rows, reserved.positions] = PENDING
        self.num_known[rows] += 1
        return reserved

    def fill(self, reserved: Reserved, sampled: IntArray) -> None:
        """Record sampled tokens, except for sequences forgotten meanwhile."""
        rows, positions, tenancy = reserved
        present = self.tenancy[rows] == tenancy
        if not present.all():
            rows, positions, sampled = rows[present], positions[present], sampled[present]
        self.tokens[rows, positions] = sampled

    def extend(self, reserved: Reserved, idx: int, tokens: IntArray) -> bool:
        """Append tokens behind entry `idx` of `reserved`, which is filled; all but the last are
        in the cache. Returns False if the sequence was forgotten meanwhile.
        """
        row, position = int(reserved.rows[idx]), int(reserved.positions[idx])
        if self.tenancy[row] != reserved.tenancy[idx]:
            return False
        assert self.num_known[row] == position + 1, "a later step was launched before"
        self.tokens[row, position + 1 : position + 1 + len(tokens)] = tokens
        self.num_known[row] += len(tokens)
        self.num_committed[row] += len(tokens)
        return True

    def slots(self, rows: IntArray | int, places: IntArray) -> IntArray:
        """Return the cache slots i64[groups, n] of `places` [n], counted from sequences' begins."""
        size = self.limits.block_size
        blocks: IntArray = self.block_tables[rows, :, places // size].astype(np.int64)
        return np.ascontiguousarray(blocks.T) * size + places % size

    def has_pending(self, rows: IntArray) -> bool:
        """Return whether the last token of any of `rows` is PENDING."""
        return bool((self.tokens[rows, self.num_known[rows] - 1] == PENDING).any())

    def sampling(self, row: int) -> SamplingParams:
        """Return the sampling parameters of the sequence in `row`."""
        params = self._sampling[row]
        assert params is not None
        return params

    def salt(self, row: int) -> str:
        """Return the tenant's salt of the sequence in `row`."""
        return self._salts[row]
