"""Prompts that enter while streams decode: by their predicted time, not by tokens."""

from __future__ import annotations

import pytest

from server.scheduler.micro_batching.cost import CostModel
from server.scheduler.planning.load_balancing import MIN_PACED, PACE, UNPACED_S
from tests.server.scheduler.engine import Engine, make_config, make_request, num_tokens_of
from tests.server.scheduler.fake_nodes import VOCAB_SIZE

LONG, BUDGET, NUM_LAYERS = 4000, 512, 12
MODEL = CostModel()


def streaming(num_streams: int = 1, *, num_nodes: int = 1) -> Engine:
    """Return an engine in which streams decode; its times are those of MODEL."""
    config = make_config(
        max_num_batched_tokens=BUDGET, max_model_len=2 * LONG, block_size=16, num_nodes=num_nodes
    )
    engine = Engine(config, num_blocks=1024, num_layers=NUM_LAYERS)
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


def plain_s(num_rows: int) -> float:
    """Return the time of a step of streams of next to no length."""
    fixed_s = MODEL.attention_fixed_s + MODEL.expert_fixed_s
    return NUM_LAYERS * (fixed_s + MODEL.slice_s(num_rows, 0))


def test_a_long_prompt_makes_steps_half_as_long_again() -> None:
    engine = streaming()
    send(engine, "long", LONG)
    entered = 0
    for (size,) in chunks(engine, 40):
        took_s = NUM_LAYERS * MODEL.slice_s(size, entered)
        is_least = size == MIN_PACED
        assert took_s <= 1.02 * PACE * plain_s(1) or is_least
        # And not much less than it may.
        assert took_s >= 0.8 * PACE * plain_s(1)
        entered += size
    assert entered < LONG / 2


@pytest.mark.slow
def test_its_end_enters_at_once_when_streams_hardly_notice() -> None:
    engine = streaming()
    send(engine, "long", LONG)
    entered = 0
    while (left := LONG - entered) > BUDGET:
        (size,), *_ = chunks(engine, 1)
        is_short = NUM_LAYERS * MODEL.slice_s(left, entered) <= UNPACED_S
        assert (size == BUDGET) == is_short, (size, left)
        entered += size
    assert chunks(engine, 1) == [[left]]


def test_a_short_prompt_enters_at_once() -> None:
    engine = streaming()
    send(engine, "short", BUDGET // 2)
    assert chunks(engine, 1) == [[BUDGET // 2]]


def test_without_streams_a_long_prompt_has_the_whole_budget() -> None:
    engine = streaming(0)
    send(engine, "long", LONG)
    assert chunks(engine, 3) == [[BUDGET]] * 3


def test_the_more_prompts_wait_the_more_of_a_step_is_theirs() -> None:
    sizes = []
    for num_prompts in (1, 3):
        engine = streaming()
        for number in range(num_prompts):
            send(engine, f"long {number}", LONG)
        first, *others = chunks(engine, 1)[0]
        assert others == [MIN_PACED] * (num_prompts - 1)
        sizes.append(first)
    assert 2.9 < sizes[1] / sizes[0] < 3.1


def test_a_node_without_streams_keeps_no_other_node_waiting() -> None:
    engine = streaming(num_nodes=2)
    streams = 0 if engine.nodes[0].sequences else 1
    send(engine, "long", LONG)
    (size,), *_ = chunks(engine, 1, node=1 - streams)
    assert NUM_LAYERS * MODEL.slice_s(size, 0) <= 1.02 * PACE * plain_s(0)
