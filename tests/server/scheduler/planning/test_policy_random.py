"""Random workloads and random orders of events, checked against direct generation.

Under any schedule (chunks, preemptions, prefix hits, stops while the next step runs, aborts,
several nodes), every request gets exactly the tokens of a direct run, every cache position read
holds the reader's own prefix, and no block is lost.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_decode.controller import Controller
from tests.server.scheduler.engine import Engine, make_config, make_request
from tests.server.scheduler.fake_nodes import VOCAB_SIZE
from topspin.messages import AddRequest


def random_request(rng: random.Random, number: int, *, max_total: int) -> AddRequest:
    """Return a request, often with a prompt that begins like another one."""
    shared = [7, 3, 9, 1] * 4
    prompt = shared[: rng.randrange(0, 17)] + [
        rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 9))
    ]
    max_tokens = rng.randrange(1, max_total - len(prompt) + 1) if rng.random() < 0.9 else 0
    min_tokens = rng.choice((0, 0, 3))
    return make_request(
        f"r{number}",
        prompt,
        max_tokens=max_tokens,
        seed=number,
        min_tokens=min_tokens,
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 2, 5)))),
        eos_token_ids=rng.choice(((), (5,))),
        salt=rng.choice(("a", "b")),
        prompt_logprobs=rng.choice((None, None, 1)),
    )


def random_drafts(rng: random.Random) -> dict[str, Any]:
    """Return an Engine's settings: no drafts, short ones or ones of several blocks, of any luck."""
    longest = rng.choice((None, 1, 3, 9))
    if longest is None:
        return {}
    settings: dict[str, Any] = {
        "offers": lambda at_most: rng.randint(0, at_most),
        "accepts": lambda at_most: rng.randint(0, at_most),
    }
    if rng.random() < 0.3:
        return {**settings, "controller": Controller(longest)}
    return {**settings, "draft_tokens": lambda request: request.arrival % (longest + 1)}


@pytest.mark.parametrize(
    "seed", [*range(16), *(pytest.param(each, marks=pytest.mark.slow) for each in range(16, 60))]
)
def test_outputs_equal_direct_generation(seed: int) -> None:
    rng = random.Random(seed)
    max_num_seqs = rng.randrange(1, 9)
    config = make_config(
        block_size=rng.choice((1, 2, 4)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randrange(0, 20),
        micro_batches=rng.choice((None, 1, 2, 3, 4)),
        prefix_caching=rng.random() < 0.7,
        max_preemptions=rng.choice((0, 1, 4)),
        max_model_len=40,
        num_nodes=rng.choice((1, 1, 2, 3)),
    )
    # From "one request just fits" to "no pressure".
    num_blocks = -(-40 // config.kv_cache.block_size) + rng.choice((0, 2, 10, 100))
    engine = Engine(config, num_blocks=num_blocks, **random_drafts(rng))
    for number in range(20):
        assert engine.add(random_request(rng, number, max_total=40)) is None
        for _ in range(rng.randrange(3)):
            engine.turn()
    engine.finish()


@pytest.mark.parametrize(
    "seed", [*range(16), *(pytest.param(each, marks=pytest.mark.slow) for each in range(16, 40))]
)
def test_any_order_of_events(seed: int) -> None:
    rng = random.Random(1000 + seed)
    num_nodes = rng.choice((1, 2, 3))
    config = make_config(
        block_size=2,
        max_num_seqs=4,
        max_num_batched_tokens=7,
        max_model_len=30,
        num_nodes=num_nodes,
        micro_batches=rng.choice((None, 2)),
        max_preemptions=rng.choice((0, 2)),
    )
    broken = rng.sample(range(1, 60), 8)
    engine = Engine(
        config, num_blocks=16, fails=lambda seq_id: seq_id in broken, **random_drafts(rng)
    )
    number = 0
    for _ in range(400):
        action = rng.choice(("add", "schedule", "schedule", "answer", "answer", "abort"))
        if action == "add" and number < 40:
            assert engine.add(random_request(rng, number, max_total=30)) is None
            number += 1
        elif action == "schedule":
            engine.schedule()
        elif action == "answer":
            engine.answer(rng.randrange(num_nodes))
        elif action == "abort" and number and rng.random() < 0.3:
            engine.abort(f"r{rng.randrange(number)}")
        engine.policy.check_integrity()
    engine.finish()
    assert any(client.failure for client in engine.clients.values())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_integrity_under_any_sequence_of_actions(data: st.DataObject) -> None:
    """The same engine, driven by hypothesis, so that a failure shrinks to a short history."""
    config = make_config(
        block_size=2,
        max_num_seqs=3,
        max_num_batched_tokens=data.draw(st.integers(3, 6)),
        max_model_len=16,
        max_preemptions=data.draw(st.integers(0, 2)),
        num_nodes=data.draw(st.integers(1, 2)),
    )
    longest = data.draw(st.integers(0, 5))
    engine = Engine(
        config,
        num_blocks=data.draw(st.integers(8, 12)),
        draft_tokens=None if longest == 0 else lambda request: longest,
        accepts=lambda at_most: data.draw(st.integers(0, at_most)),
    )
    number = 0
    actions = st.sampled_from(("add", "add", "schedule", "answer", "abort"))
    for action in data.draw(st.lists(actions, max_size=40)):
        if action == "add":
            length = data.draw(st.integers(1, 9))
            message = make_request(
                f"r{number}",
                [data.draw(st.integers(0, 1)) for _ in range(length)],
                max_tokens=data.draw(st.integers(0, 16 - length)),
                seed=number,
                prompt_logprobs=data.draw(st.sampled_from((None, 0))),
                stop_token_ids=tuple(range(10)),
            )
            assert engine.add(message) is None
            number += 1
        elif action == "schedule":
            engine.schedule()
        elif action == "answer":
            engine.answer(data.draw(st.integers(0, len(engine.nodes) - 1)))
        elif number:
            engine.abort(f"r{data.draw(st.integers(0, number - 1))}")
        engine.policy.check_integrity()
    engine.finish()
