"""The times that a request's first output tells, and the tokens of steps."""

from __future__ import annotations

import pytest

from tests.server.scheduler.engine import Engine, make_config, make_request
from topspin.messages import ITERATION_BUCKETS

STEP_S = 0.01


def test_the_first_output_tells_the_wait_and_the_prompts_time() -> None:
    """On one seat: the second request waits for the first, and its prompt takes three steps."""
    engine = Engine(make_config(max_num_seqs=1, max_num_batched_tokens=4))
    engine.now = 100.0
    engine.add(make_request("first", [1, 2], max_tokens=3))
    engine.add(make_request("second", list(range(10)), max_tokens=2, seed=1))
    engine.finish()
    first, second = (engine.clients[name].outputs for name in ("first", "second"))
    assert (first[0].queue_s, first[0].prefill_s) == (0.0, pytest.approx(STEP_S))
    assert second[0].queue_s >= 2 * STEP_S
    assert second[0].prefill_s >= 3 * STEP_S
    total_s = engine.now - 100.0
    assert second[0].queue_s + second[0].prefill_s < total_s
    later = [each for outputs in (first, second) for each in outputs[1:]]
    assert later
    assert all(each.queue_s == each.prefill_s == 0.0 for each in later)


def test_a_request_without_output_tells_its_times_at_its_end() -> None:
    engine = Engine(make_config())
    engine.add(make_request("r", [1, 2, 3], max_tokens=0))
    engine.finish()
    (only,) = engine.clients["r"].outputs
    assert only.prefill_s == pytest.approx(STEP_S)


def test_the_first_token_tells_the_times_after_the_prompts_scores() -> None:
    """Scores of four tokens come first; the fifth token is a step of its own."""
    engine = Engine(make_config(max_num_batched_tokens=4))
    engine.add(make_request("r", list(range(5)), max_tokens=2, prompt_logprobs=0))
    engine.finish()
    scores, first, last = engine.clients["r"].outputs
    assert (len(scores.prompt_logprobs), scores.token_ids) == (4, ())
    assert first.prefill_s == pytest.approx(2 * STEP_S)
    assert last.prefill_s == 0.0
    stats = engine.policy.stats(0, (), engine.now)
    assert (stats.prompt_tokens, stats.generation_tokens) == (5, 2)


def test_steps_are_counted_by_their_tokens() -> None:
    engine = Engine(make_config(max_num_batched_tokens=16))
    engine.add(make_request("r", list(range(20)), max_tokens=3))
    engine.finish()
    stats = engine.policy.stats(0, (), engine.now)
    # The prompt in chunks of 16 and 4 tokens, then two steps of one; the last token is not fed.
    assert stats.iteration_tokens_sum == 22
    counts = dict(zip(ITERATION_BUCKETS, stats.iteration_tokens, strict=False))
    assert (counts[1], counts[8], counts[16]) == (2, 1, 1)
    assert sum(stats.iteration_tokens) == stats.num_steps
