"""The search of sequences, told their committed lengths, whenever codebooks are learnt.

Random prompts, steps, shared texts, ends and reuse of blocks, with codebooks learnt between steps,
within them, by one or another sequence of a text, or as late as possible.
"""

from __future__ import annotations

import dataclasses
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from attention_nodes.long_contexts.learning import CodebookJob, Learning
from attention_nodes.long_contexts.retrieval import KeyIndex
from attention_nodes.step import kv_cache
from attention_nodes.step.sequences import SequenceTable, TableLimits
from attention_nodes.step.step_inputs import NO_SLICES
from kernels.contracts import SEGMENT_KEYS
from kernels.dispatch import select_ops
from kernels.retrieval import encode, learn_codebooks
from kernels.runtime import HostRuntime
from models.description.config import ModelConfig, load_model_config
from tests.attention_nodes.plans import new_sequence
from tests.checkpoints import make_checkpoint
from topspin.messages import SamplingParams, pack_ints
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.retrieval import RetrievalPolicy

BLOCK: Final = 256
BLOCKS: Final = 14
"""Of a text."""
LENGTH: Final = BLOCKS * BLOCK
NUM_TEXTS: Final = 2
NUM_LAYERS: Final = 3
NUM_GROUPS, HEAD_DIM = 1, 16
POLICY: Final = RetrievalPolicy(num_tokens=128, num_recent=32, num_iterations=1)
NUM_ASKED: Final = 100
"""What some sequences ask for; their recent window is shorter."""
SEQUENCES: Final = range(4)


@cache
def model() -> ModelConfig:
    with TemporaryDirectory() as folder:
        found = load_model_config(make_checkpoint(Path(folder), "llama"))
    layers = found.layers[:1] * NUM_LAYERS
    return dataclasses.replace(found, layers=layers, num_kv_heads=NUM_GROUPS, head_dim=HEAD_DIM)


@lru_cache(maxsize=64)
def keys_of(text: int, layer: int) -> torch.Tensor:
    """Return keys [G, n, D]."""
    generator = torch.Generator().manual_seed(NUM_LAYERS * text + layer)
    return torch.randn(NUM_GROUPS, LENGTH, HEAD_DIM, generator=generator)


@lru_cache(maxsize=256)
def codebooks_of(text: int, layer: int, segment: int) -> torch.Tensor:
    own = keys_of(text, layer)[:, segment * SEGMENT_KEYS : (segment + 1) * SEGMENT_KEYS]
    return learn_codebooks(own, num_iterations=POLICY.num_iterations)


@lru_cache(maxsize=256)
def codes_of(text: int, layer: int, segment: int, book: int) -> torch.Tensor:
    """Return the codes of a segment by the codebooks of another."""
    own = keys_of(text, layer)[:, segment * SEGMENT_KEYS : (segment + 1) * SEGMENT_KEYS]
    return encode(own, codebooks_of(text, layer, book))


def searched(committed: int, policy: RetrievalPolicy) -> tuple[int, int] | None:
    """Return how many segments have their own codebooks, and the end of the keys to search."""
    num_closed = (committed - min(64, policy.num_recent)) // SEGMENT_KEYS
    behind = (committed - policy.num_recent) // 64 * 64
    end = min(max(num_closed * SEGMENT_KEYS, behind), (num_closed + 1) * SEGMENT_KEYS)
    end = min(end, committed - policy.num_recent)
    is_worth_it = num_closed > 0 and end - policy.num_sinks > policy.num_selected
    return (num_closed, end) if is_worth_it else None


class Sequences(RuleBasedStateMachine):
    """Sequences of a text share its blocks, as those of one prefix do."""

    def __init__(self) -> None:
        super().__init__()
        limits = TableLimits(LENGTH, BLOCK, NUM_TEXTS * BLOCKS, vocab_size=10)
        self.table = SequenceTable(limits)
        kept = KvCacheSpec(block_size=BLOCK, retrieval=POLICY)
        layers = kv_cache.layer_specs(model(), torch.float32, kept)
        self.cache = kv_cache.of_blocks(layers, limits.num_blocks, block_size=BLOCK)
        self.index = KeyIndex(
            model(),
            select_ops("reference", torch.float32),
            self.cache,
            self.table,
            POLICY,
            num_blocks=limits.num_blocks,
            max_num_seqs=len(SEQUENCES),
            runtime=HostRuntime(),
        )
        self.text_of: dict[int, int] = {}
        self.text_in = list(range(NUM_TEXTS))
        self.num_texts = NUM_TEXTS

    def row(self, sequence: int) -> int:
        return int(self.table.rows_of(np.array([sequence]))[0])

    def policy(self, sequence: int) -> RetrievalPolicy:
        return POLICY.with_tokens(NUM_ASKED) if sequence == 0 else POLICY

    @rule(
        sequence=st.sampled_from(SEQUENCES),
        place=st.integers(0, NUM_TEXTS - 1),
        num_prompt=st.integers(SEGMENT_KEYS - 20, LENGTH - 300),
        is_cached=st.booleans(),
    )
    def admit(self, sequence: int, place: int, num_prompt: int, is_cached: bool) -> None:
        if sequence in self.text_of:
            return
        shared = [self.table.num_committed[self.row(each)] for each in self.text_of_place(place)]
        num_cached = max(shared, default=0) // BLOCK * BLOCK if is_cached else 0
        num_asked = NUM_ASKED if sequence == 0 else None
        self.table.admit(
            new_sequence(
                sequence,
                [1] * LENGTH,
                num_prompt_tokens=num_prompt,
                num_computed=min(num_cached, (num_prompt - 1) // BLOCK * BLOCK),
                blocks=pack_ints(range(place * BLOCKS, (place + 1) * BLOCKS)),
                max_length=LENGTH,
                sampling=SamplingParams(max_tokens=1, seed=0, kv_retrieval_tokens=num_asked),
            )
        )
        self.text_of[sequence] = place

    def text_of_place(self, place: int) -> list[int]:
        return [sequence for sequence, own in self.text_of.items() if own == place]

    @rule(sequence=st.sampled_from(SEQUENCES))
    def end(self, sequence: int) -> None:
        if sequence in self.text_of:
            del self.text_of[sequence]
            self.index.end(np.array([self.row(sequence)]))
            self.table.forget(sequence)

    @rule(place=st.integers(0, NUM_TEXTS - 1))
    def overwrite(self, place: int) -> None:
        if not self.text_of_place(place):
            self.index.overwrite(range(place * BLOCKS, (place + 1) * BLOCKS))
            self.text_in[place] = self.num_texts
            self.num_texts += 1

    @rule(
        chunk=st.sampled_from([300, 512, 1500]),
        num_new=st.integers(1, 9),
        may_wait=st.booleans(),
        num_waits=st.integers(1, 4),
        num_steps=st.integers(1, 6),
        skipped=st.sampled_from([None, *SEQUENCES]),
    )
    def step(
        self,
        chunk: int,
        num_new: int,
        may_wait: bool,
        num_waits: int,
        num_steps: int,
        skipped: int | None,
    ) -> None:
        for _ in range(num_steps):
            self.index.code(may_wait=may_wait)
            taken = [each for each in self.text_of if each != skipped]
            rows, counts = [], []
            for sequence in taken:
                row = self.row(sequence)
                left = int(self.table.num_prompt[row] - self.table.num_committed[row])
                count = min(chunk, left) if left > 0 else num_new
                if self.table.num_committed[row] + count <= LENGTH:
                    rows.append(row)
                    counts.append(count)
            self.check(rows)
            learn = self.index.learning(rows, num_waits)
            for _ in range(num_waits - 1 if learn is not None else 0):
                learn()
            for row, count in zip(rows, counts, strict=True):
                self.write(row, count)
            self.table.commit(np.array(rows, dtype=np.int64), np.array(counts, dtype=np.int64))
            self.index.follow(np.array(rows, dtype=np.int64))

    def write(self, row: int, count: int) -> None:
        """Write what a step computes: the text's keys."""
        begin = int(self.table.num_committed[row])
        slots = torch.from_numpy(self.table.slots(row, np.arange(begin, begin + count))[0])
        text = self.text_in[int(self.table.block_tables[row, 0, 0]) // BLOCKS]
        for layer, keys in enumerate(self.cache.keys):
            own = keys_of(text, layer)[:, begin : begin + count]
            keys.flatten(0, 1)[slots] = own.transpose(0, 1)

    def check(self, rows: list[int]) -> None:
        """All of a step's rows decode a token; the sequences that search do so as they should."""
        ones = np.ones(len(rows), dtype=np.int64)
        slices = NO_SLICES._replace(rows=np.array(rows, dtype=np.int64), certain=ones, counts=ones)
        retrieval = self.index.retrieval_of(slices)
        found = [] if retrieval is None else retrieval.seqs.tolist()
        for idx, row in enumerate(rows):
            committed = int(self.table.num_committed[row])
            policy = self.policy(int(self.table.seq_id_of[row]))
            wanted = None
            if committed >= self.table.num_prompt[row]:
                wanted = searched(committed, policy)
            assert (idx in found) == (wanted is not None), (committed, wanted)
            if retrieval is None or wanted is None:
                continue
            (num_closed, end), at = wanted, found.index(idx)
            assert int(retrieval.coded_end[at]) == end
            text = self.text_in[int(self.table.block_tables[row, 0, 0]) // BLOCKS]
            for segment in range(-(-end // SEGMENT_KEYS)):
                place = int(retrieval.segments[at, segment])
                book, count = min(segment, num_closed - 1), end - segment * SEGMENT_KEYS
                for layer, codes in self.index.codes.items():
                    wanted_codes = codes_of(text, layer, segment, book)[:, :, :count]
                    own = codes.codes[place, :, :, :count]
                    assert torch.equal(codes.centroids[place], codebooks_of(text, layer, book))
                    assert torch.equal(own, wanted_codes)


Sequences.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
TestSequences = Sequences.TestCase


def test_codebooks_are_learnt_once_by_whoever_needs_them() -> None:
    learning = Learning([2, 5])
    for place, begin in ((7, 0), (8, 1024)):
        learning.begin(place)
        learning.want(1, begin, place)
    learning.want(2, 0, 7)
    assert list(learning.take(1, 1)) == [CodebookJob(0, place=7, layer=2, is_last=False)]
    learning.end(1)
    assert learning.num_lacking(1) == 0
    assert learning.num_lacking(2) == 1
    assert list(learning.take(2, 9)) == [CodebookJob(0, place=7, layer=5, is_last=True)]
    learning.want(3, 0, 7)
    learning.want(3, 1024, 8)
    assert learning.num_lacking(3) == 2, "nobody has learnt the other's"
    assert learning.num_lacking(3, begin=1) == 2
    assert learning.num_lacking(3, begin=1025) == 0


def test_a_decoding_sequence_learns_a_little_in_each_step() -> None:
    """A segment that closes costs no step more than its share; the last is learnt in time."""
    machine = Sequences()
    num_prompt = 2 * SEGMENT_KEYS - 3
    machine.admit(sequence=1, place=0, num_prompt=num_prompt, is_cached=False)
    row = machine.row(1)
    lacking = []
    for _ in range(10 + POLICY.num_recent):
        machine.step(chunk=4000, num_new=1, may_wait=True, num_waits=1, num_steps=1, skipped=None)
        lacking.append(machine.index._learning.num_lacking(row))
    begin = next(idx for idx, count in enumerate(lacking[1:]) if count) + 1
    assert lacking[1] == 0, "what is in use is learnt at once"
    steps = lacking[begin : begin + NUM_LAYERS]
    assert steps == list(range(NUM_LAYERS - 1, -1, -1)), lacking
