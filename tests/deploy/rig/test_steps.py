"""The plans of a batch without a scheduler, played as a node plays them."""

from __future__ import annotations

import numpy as np

from deploy.rig.steps import Batch, Steps
from topspin.messages import StepPlan


def ints(packed: bytes) -> list[int]:
    return np.frombuffer(packed, dtype="<i4").tolist()


class PlayedNode:
    """The sequences of a node: the positions that each has room for, and those that are cached."""

    def __init__(self) -> None:
        self.step = 0
        self.room: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}

    def play(self, plan: StepPlan) -> list[int]:
        """Run a step as a node does; return the rows of each micro-batch."""
        assert (plan.ticket.previous, plan.ticket.step) == (self.step, self.step + 1)
        self.step += 1
        for seq_id in ints(plan.finished):
            del self.blocks[seq_id], self.cached[seq_id], self.room[seq_id]
        for new in plan.new:
            assert new.seq_id not in self.blocks
            self.blocks[new.seq_id] = ints(new.blocks)
            self.cached[new.seq_id] = new.num_computed
            self.room[new.seq_id] = min(new.max_length, 4 * len(self.blocks[new.seq_id]))
        held = [block for each in self.blocks.values() for block in each]
        assert len(held) == len(set(held))
        for part in plan.micro_batches:
            for seq_id, count in zip(ints(part.seq_ids), ints(part.num_tokens), strict=True):
                self.cached[seq_id] += count
                assert self.cached[seq_id] <= self.room[seq_id]
        rows = [sum(ints(part.num_tokens)) for part in plan.micro_batches]
        assert all(a >= b for a, b in zip(plan.ticket.row_buckets, rows, strict=True))
        return rows


def make_batch() -> Batch:
    return Batch(range(12), block_size=4, vocab_size=50)


def test_every_position_has_a_block() -> None:
    batch, node = make_batch(), PlayedNode()
    batch.begin(3, 7, growth=2)
    assert node.play(batch.decode(2)) == [1, 2]
    assert node.play(batch.decode(9)) == [1, 1, 1]
    assert node.play(batch.decode(rows=1)) == [1]
    assert batch.contexts == list(node.cached.values()) == [10, 9, 9]
    batch.begin(1, 3, growth=1)
    batch.begin(2, 4, growth=0)  # a sequence that was never sent is not finished either
    assert node.play(batch.decode()) == [2]
    assert batch.contexts == list(node.cached.values()) == [5, 5]


def test_a_long_prompt_is_computed_within_the_budget() -> None:
    batch, node = make_batch(), PlayedNode()
    plans = batch.prefill(37, start=2, most=16)
    assert [node.play(plan) for plan in plans] == [[16], [16], [5]]
    assert [plan.micro_batches[0].wanted for plan in plans] == [b"\0", b"\0", b"\1"]
    assert batch.contexts == list(node.cached.values()) == [39]


def test_two_batches_of_one_kind_are_the_same() -> None:
    """So both nodes of a rig may make the plans."""
    first, second = make_batch(), make_batch()
    for batch in (first, second):
        batch.begin(2, 5, growth=3)
    assert first.decode() == second.decode()


def test_a_sequence_has_the_tokens_and_blocks_of_its_caller() -> None:
    steps = Steps()
    one = steps.admit([3, 4, 5], [7, 9], max_length=8, num_computed=2, num_prompt=2)
    two = steps.admit([6], [1], max_length=4, temperature=0.5)
    plan = steps.advance({one: 1, two: 1}, sample=False)
    first, second = plan.new
    assert (ints(first.tokens), ints(first.blocks)) == ([3, 4, 5], [7, 9])
    assert (first.num_computed, first.num_prompt_tokens, first.max_length) == (2, 2, 8)
    assert (second.num_prompt_tokens, second.sampling.temperature) == (1, 0.5)
    assert plan.micro_batches[0].wanted == b"\0\0"
    steps.end(one)
    plan = steps.advance({two: 1})
    assert (ints(plan.finished), plan.new) == ([one], ())
