"""Prompts that enter while streams decode: by their predicted time, not by tokens."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest

from server.scheduler.micro_batching.cost import CostModel
from server.scheduler.planning.load_balancing import PACE, PACED_CHUNK, UNPACED_S
from tests.server.scheduler.engine import Engine, make_config, make_request, num_tokens_of
from tests.server.scheduler.fake_nodes import VOCAB_SIZE
from topspin.messages import unpack_ints

LONG, BUDGET, NUM_LAYERS = 4000, 512, 12
MODEL = CostModel()
SLOW = dataclasses.replace(MODEL, expert_token_s=20 * MODEL.expert_token_s)
"""64 tokens take many times the half of a step of streams."""


def streaming(num_streams: int = 1, *, num_nodes: int = 1, cost: CostModel = MODEL) -> Engine:
    """Return an engine in which streams decode; its times are those of `cost`."""
    config = make_config(
        max_num_batched_tokens=BUDGET, max_model_len=2 * LONG, block_size=16, num_nodes=num_nodes
    )
    engine = Engine(config, num_blocks=1024, num_layers=NUM_LAYERS, cost=cost)
    for number in range(num_streams):
        send(engine, f"stream {number}", 3)
        engine.turn()
    return engine


def send(engine: Engine, name: str, length: int) -> None:
    number = len(engine.clients)
    prompt = [(number + 3 * idx) % (VOCAB_SIZE - 1) + 1 for idx in range(length)]
    engine.add(make_request(name, prompt, max_tokens=LONG, seed=number, salt=name))


def chunks(engine: Engine, num_steps: int, *, node: int = 0) -> list[list[int]]:
    """Return the slices of prompts of the next steps, without those of one row."""
    first = len(engine.steps)
    while len(engine.steps) < first + num_steps:
        assert engine.turn()
    steps = engine.steps[first:]
    return [[size for size in num_tokens_of(step, node) if size > 1] for step in steps]


def plain_s(num_rows: int, cost: CostModel = MODEL) -> float:
    """Return the time of a step of streams of next to no length."""
    fixed_s = cost.attention_fixed_s + cost.expert_fixed_s
    return NUM_LAYERS * (fixed_s + cost.slice_s(num_rows, 0))


def enters_at_its_pace(steps: list[list[int]], num_prompts: int, cost: CostModel = MODEL) -> int:
    """Check the chunks of the first of `num_prompts`, one after another; returns their tokens.

    They take the time that prompts may have, but for what is saved up for a chunk.
    """
    entered, took_s = 0, 0.0
    for number, sizes in enumerate(steps, start=1):
        for size in sizes:
            assert size >= PACED_CHUNK
            took_s += NUM_LAYERS * cost.slice_s(size, entered)
            entered += size
        given_s = number * num_prompts * PACE * plain_s(1, cost)
        assert took_s <= 1.02 * given_s
        assert took_s >= 0.98 * given_s - NUM_LAYERS * cost.slice_s(PACED_CHUNK, entered)
    return entered


def test_a_long_prompt_makes_steps_half_as_long_again() -> None:
    engine = streaming()
    send(engine, "long", LONG)
    assert enters_at_its_pace(chunks(engine, 40), 1) < LONG / 2


@pytest.mark.slow
def test_its_end_enters_at_once_when_streams_hardly_notice() -> None:
    engine = streaming()
    send(engine, "long", LONG)
    entered = 0
    while NUM_LAYERS * MODEL.slice_s(LONG - entered, entered) > UNPACED_S:
        (sizes,) = chunks(engine, 1)
        assert sum(sizes) < 100
        entered += sum(sizes)
    left = LONG - entered
    assert chunks(engine, 1) == [[min(left, BUDGET)]]
    assert left > BUDGET / 2


def test_a_short_prompt_enters_at_once() -> None:
    engine = streaming()
    send(engine, "short", BUDGET // 2)
    assert chunks(engine, 1) == [[BUDGET // 2]]


def test_without_streams_a_long_prompt_has_the_whole_budget() -> None:
    engine = streaming(0)
    send(engine, "long", LONG)
    assert chunks(engine, 3) == [[BUDGET]] * 3


def test_the_more_prompts_wait_the_more_of_a_step_is_theirs() -> None:
    engine = streaming()
    for number in range(3):
        send(engine, f"long {number}", LONG)
    steps = chunks(engine, 40)
    assert max(map(len, steps)) == 1  # those of its length follow it
    assert enters_at_its_pace(steps, 3) > PACED_CHUNK


def test_a_node_without_streams_keeps_no_other_node_waiting() -> None:
    engine = streaming(num_nodes=2)
    streams = 0 if engine.nodes[0].sequences else 1
    send(engine, "long", LONG)
    (size,), *_ = chunks(engine, 1, node=1 - streams)
    assert NUM_LAYERS * MODEL.slice_s(size, 0) <= 1.02 * PACE * plain_s(0)


def test_a_slow_node_saves_up_for_a_chunk_and_keeps_its_pace() -> None:
    engine = streaming(cost=SLOW)
    send(engine, "long", LONG)
    steps = chunks(engine, 100)
    assert len([sizes for sizes in steps if not sizes]) > 50
    enters_at_its_pace(steps, 1, SLOW)
    assert max(map(sum, steps)) <= PACED_CHUNK + 4


def test_a_much_shorter_long_prompt_has_half_of_the_time() -> None:
    engine = streaming(cost=SLOW)
    send(engine, "longest", 2 * LONG - 100)
    chunks(engine, 1)
    send(engine, "long", LONG // 5)
    first = len(engine.steps)
    chunks(engine, 200)
    entered: dict[int, int] = defaultdict(int)
    for step in engine.steps[first:]:
        (rows,) = step.plans[0].micro_batches
        sizes = zip(unpack_ints(rows.seq_ids), unpack_ints(rows.num_tokens), strict=True)
        for seq_id, size in sizes:
            entered[seq_id] += size
    _stream, longest, shorter = sorted(entered)
    assert entered[longest] >= 2 * PACED_CHUNK
    assert abs(entered[longest] - entered[shorter]) <= PACED_CHUNK
