"""Attention nodes without tensors: they execute StepPlans and check the scheduler.

A node keeps, per cache position, which token of which prefix was written there and for which
tenant, and checks at every slice that the sequence's block table holds exactly its own prefix. Its
model is deterministic: the next token is a hash of the whole prefix and the seed, so that
`generate` below is an oracle for any schedule. Where a draft is allowed, some of it is right, as
the test says, and all slots reserved for the rest are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from topspin.messages import (
    NOT_NUMBERS,
    SAMPLE,
    SCORE,
    MicroBatch,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepResult,
    StepTimings,
    TokenLogprobs,
    pack_ints,
    unpack_ints,
)
from topspin.plan.spec import AttentionNode

VOCAB_SIZE = 50
TIMINGS = StepTimings(total_s=0.0, attention_s=0.0, wait_s=0.0, sample_s=0.0)


class Written(NamedTuple):
    """Content of a cache position: its token's whole prefix as a digest, the tenant, the group."""

    prefix: bytes
    tenant: str
    group: int = 0


NOTHING = Written(b"", "")


def extend(prefix: bytes, token: int) -> bytes:
    """Return the digest of a prefix with one more token."""
    return blake2b(prefix + token.to_bytes(4, "little"), digest_size=12).digest()


def next_token(prefix: bytes, seed: int) -> int:
    """Return the token that the model samples after `prefix`."""
    digest = blake2b(prefix + seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def generate(prompt: Sequence[int], sampling: SamplingParams, max_model_len: int) -> list[int]:
    """Return the output that a request must get, computed directly and alone."""
    prefix = b""
    for token in prompt:
        prefix = extend(prefix, token)
    output: list[int] = []
    stops = {*sampling.stop_token_ids, *sampling.eos_token_ids}
    while len(output) < sampling.max_tokens and len(prompt) + len(output) < max_model_len:
        token = next_token(prefix, sampling.seed)
        if len(output) < sampling.min_tokens and token in stops:
            token = unmasked(token, stops)
        output.append(token)
        prefix = extend(prefix, token)
        if token in stops and len(output) > sampling.min_tokens:
            break
    return output


def score(prompt: Sequence[int], position: int) -> TokenLogprobs:
    """Return what the model says of a prompt's token."""
    return TokenLogprobs(-float(position), (prompt[position],), (-float(position),), rank=1)


def unmasked(token: int, stops: set[int]) -> int:
    """Return the next token id that is no stop: the effect of masking before min_tokens."""
    while token in stops:
        token = (token + 1) % VOCAB_SIZE
    return token


@dataclass
class NodeSequence:
    """A sequence as the node knows it. `prefixes[i]` digests tokens 0..i.

    `written[i]` is what the cache must hold for token i. `table` has a block of each group of
    layers, side by side; a negative one where no query sees the positions.
    """

    new: NewSequence
    tokens: list[int]
    table: list[int]
    num_committed: int
    prefixes: list[bytes] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)


class FakeNode:
    """One attention node. `fails(seq_id)` makes a sampled sequence fail permanently.

    `offers(n)` says how many of at most n tokens it drafts, `accepts(n)` how many of n are right.
    `windows` are those of its groups of layers.
    """

    def __init__(
        self,
        node: AttentionNode,
        *,
        num_blocks: int,
        block_size: int,
        tenant_of: Callable[[int], str] = lambda seed: "",
        fails: Callable[[int], bool] = lambda seq_id: False,
        offers: Callable[[int], int] = lambda at_most: at_most,
        accepts: Callable[[int], int] = lambda at_most: 0,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.index = node.index
        self.sequences: dict[int, NodeSequence] = {}
        self.touched: dict[int, set[int]] = {}
        """The blocks that the last step has read or written, by sequence."""
        self._cache = [[NOTHING] * block_size for _ in range(num_blocks)]
        self._node = node
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._tenant_of = tenant_of
        self.fails = fails
        self.timings = TIMINGS
        self._offers = offers
        self._accepts = accepts
        self._windows = windows
        self._may_draft = False
        self._scores: dict[int, tuple[TokenLogprobs, ...]] = {}
        self._drafted: dict[int, int] = {}
        self._seen_ids: set[int] = set()
        self._last_step = 0
        self._generation = 1

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step and return the node's result."""
        ticket = plan.ticket
        assert ticket.step > self._last_step
        assert ticket.generation >= self._generation
        if ticket.previous == 0:
            self.sequences.clear()  # a generation begins
            self._generation = ticket.generation
        else:
            assert ticket.previous == ticket.step - 1
        assert self.index in ticket.participants
        self._last_step = ticket.step
        for seq_id in unpack_ints(plan.finished):
            del self.sequences[seq_id]
        for new in plan.new:
            self._admit(new)
        assert len(self.sequences) <= self._node.max_num_seqs
        assert len(plan.micro_batches) == ticket.num_micro_batches == len(ticket.row_buckets)
        sampled: dict[int, list[int]] = {}
        self._scores = {}
        self._drafted = {}
        self.touched = {}
        errors: dict[int, str] = {}
        seen: list[int] = []
        num_rows = 0
        for micro_batch, bucket in zip(plan.micro_batches, ticket.row_buckets, strict=True):
            rows = sum(unpack_ints(micro_batch.num_tokens))
            rows += sum(unpack_ints(micro_batch.max_draft))
            assert rows <= bucket
            num_rows += rows
            seen += self._run(micro_batch, sampled, errors)
        assert len(set(seen)) == len(seen), "a sequence is in two slices"
        assert seen, "a participant has something to do"
        assert num_rows <= self._node.max_num_batched_tokens
        return StepResult(
            step=ticket.step,
            generation=ticket.generation,
            index=self.index,
            seq_ids=pack_ints(sampled.keys()),
            counts=pack_ints(map(len, sampled.values())) if self._may_draft else b"",
            drafted=pack_ints(self._drafted.get(seq_id, 0) for seq_id in sampled),
            tokens=pack_ints(token for tokens in sampled.values() for token in tokens),
            timings=self.timings,
            prompt_logprobs=self._scores,
            errors=errors,
        )

    def _admit(self, new: NewSequence) -> None:
        assert new.seq_id not in self._seen_ids, "a sequence id came twice"
        self._seen_ids.add(new.seq_id)
        table = list(unpack_ints(new.blocks))
        tokens = list(unpack_ints(new.tokens))
        assert new.num_computed * len(self._windows) == len(table) * self._block_size
        assert new.num_computed < len(tokens), "no token is left to compute"
        seq = NodeSequence(new, [], table, new.num_computed)
        for token in tokens:
            self._append(seq, token)
        self.sequences[new.seq_id] = seq

    def _append(self, seq: NodeSequence, token: int) -> None:
        seq.tokens.append(token)
        seq.prefixes.append(extend(seq.prefixes[-1] if seq.prefixes else b"", token))
        tenant = self._tenant_of(seq.new.sampling.seed)
        seq.written.append(Written(seq.prefixes[-1], tenant))

    def _run(
        self, micro_batch: MicroBatch, sampled: dict[int, list[int]], errors: dict[int, str]
    ) -> list[int]:
        block_ids = list(unpack_ints(micro_batch.block_ids))
        seq_ids = list(unpack_ints(micro_batch.seq_ids))
        max_draft = unpack_ints(micro_batch.max_draft)
        self._may_draft |= bool(max_draft)
        slices = zip(
            seq_ids,
            unpack_ints(micro_batch.num_tokens),
            max_draft or [0] * len(seq_ids),
            micro_batch.wanted,  # a byte per slice
            unpack_ints(micro_batch.block_counts),
            strict=True,
        )
        for seq_id, num_tokens, draft, wanted, num_blocks in slices:
            assert num_tokens > 0
            seq = self.sequences[seq_id]
            assert all(0 <= block < self._num_blocks for block in block_ids[:num_blocks])
            seq.table += block_ids[:num_blocks]
            del block_ids[:num_blocks]
            failed = self.fails(seq_id)
            if wanted & SAMPLE and self._may_draft and len(seq.tokens) >= seq.new.max_length:
                sampled[seq_id] = []  # a draft has completed it, and this plan did not know
                continue
            start = seq.num_committed
            self._feed(seq, num_tokens, garbage=failed)
            is_last = seq.num_committed >= len(seq.tokens)
            sample = is_last and len(seq.tokens) < seq.new.max_length
            assert bool(wanted & SAMPLE) == sample
            assert sample or not draft
            if wanted & SCORE and not failed:
                self._scores[seq_id] = tuple(
                    score(seq.tokens, position)
                    for position in range(start + 1, seq.num_committed + 1)
                    if position < seq.new.num_prompt_tokens
                )
            if failed:
                errors[seq_id] = NOT_NUMBERS
                # The plan after next does not know of the failure yet: keep the lengths that it
                # expects.
                if sample:
                    self._append(seq, 0)
            elif sample:
                sampled[seq_id] = [self._sample(seq)]
                sampled[seq_id] += self._draft(seq, draft)
        assert not block_ids
        return seq_ids

    def _feed(self, seq: NodeSequence, num_tokens: int, *, garbage: bool) -> None:
        size = self._block_size
        end = seq.num_committed + num_tokens
        assert end <= len(seq.tokens), "a token is fed that is not known"
        num_groups = len(self._windows)
        assert end * num_groups <= len(seq.table) * size, "no block for a position"
        assert self._may_draft or len(seq.table) == -(-end // size) * num_groups, "a block too many"
        seen = [
            range(0 if window is None else max(0, seq.num_committed - window + 1), end)
            for window in self._windows
        ]
        blocks = [
            block
            for group, positions in enumerate(seen)
            for block in seq.table[group::num_groups][positions.start // size :]
        ]
        assert len(set(blocks)) == len(blocks), "a block twice"
        self.touched.setdefault(seq.new.seq_id, set()).update(blocks)
        for group in range(num_groups):
            for position in range(seq.num_committed, end):
                written = NOTHING if garbage else seq.written[position]._replace(group=group)
                self._block(seq, position, group)[position % size] = written
        for group, positions in enumerate(seen if not garbage else ()):
            for position in positions:
                found = self._block(seq, position, group)[position % size]
                assert found == seq.written[position]._replace(group=group), "another's cache"
        seq.num_committed = end

    def _block(self, seq: NodeSequence, position: int, group: int) -> list[Written]:
        """Return the cached positions of a sequence's block in a group of layers."""
        block = seq.table[position // self._block_size * len(self._windows) + group]
        assert block >= 0, "no block where a query sees"
        return self._cache[block]

    def _draft(self, seq: NodeSequence, at_most: int) -> list[int]:
        """Feed right draft tokens, sample behind each; the other slots get something else."""
        at_most = min(at_most, seq.new.max_length - 1 - seq.num_committed)
        first, end = seq.num_committed, seq.num_committed + at_most
        num_columns = len(seq.table) // len(self._windows)
        assert end <= num_columns * self._block_size, "no block for a draft"
        more = []
        length = self._drafted[seq.new.seq_id] = self._offers(max(at_most, 0))
        for _ in range(self._accepts(length)):
            self._feed(seq, 1, garbage=False)
            more.append(self._sample(seq))
        assert len(more) <= length
        for position in range(first + len(more), end):
            for group in range(len(self._windows)):
                self._block(seq, position, group)[position % self._block_size] = NOTHING
        return more

    def _sample(self, seq: NodeSequence) -> int:
        sampling = seq.new.sampling
        token = next_token(seq.prefixes[-1], sampling.seed)
        if len(seq.tokens) - seq.new.num_prompt_tokens < sampling.min_tokens:
            token = unmasked(token, {*sampling.stop_token_ids, *sampling.eos_token_ids})
        self._append(seq, token)
        return token
