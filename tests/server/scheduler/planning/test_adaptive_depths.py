"""The controller in the policy: drafts where they pay, plain decoding where they do not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from server.scheduler.planning.adaptive_depths import LOSING_STEPS, AdaptiveDepths
from spec_decode.controller import Controller
from tests.server.scheduler.engine import Engine, make_config, make_request

MOST = 5


def flat(num_rows: int) -> float:
    return 0.01 * (1 + 0.01 * num_rows)


def steep(num_rows: int) -> float:
    return 0.01 * num_rows


def run(
    controller: Controller | None,
    *,
    accepts: Callable[[int], int],
    step_s: Callable[[int], float],
    num_tokens: int = 500,
    num_requests: int = 2,
) -> Engine:
    """Run requests of different lengths to their end; their outputs are checked."""
    engine = Engine(
        make_config(max_model_len=num_tokens + 64, max_num_batched_tokens=64),
        num_blocks=1000,
        controller=controller,
        accepts=accepts,
        step_s=step_s,
    )
    for idx in range(num_requests):
        engine.add(make_request(str(idx), [1] * (3 + 9 * idx), max_tokens=num_tokens, seed=idx))
    engine.finish(max_turns=num_tokens + 100)
    return engine


@pytest.mark.slow
def test_drafts_that_are_accepted_make_steps_fewer() -> None:
    plain = run(None, accepts=lambda most: most, step_s=flat)
    controller = Controller(MOST)
    engine = run(controller, accepts=lambda most: most, step_s=flat)
    assert engine.now < plain.now / 4
    assert engine.policy.take_warning() is None
    assert not controller._speculators, "a request has ended"


@pytest.mark.slow
def test_drafts_that_are_refused_cost_next_to_nothing_and_the_user_hears_of_it_once() -> None:
    def refused(most: int) -> int:
        return 0

    settings: dict[str, Any] = {"num_tokens": LOSING_STEPS + 50, "num_requests": 1}
    plain = run(None, accepts=refused, step_s=steep, **settings)
    engine = run(Controller(MOST), accepts=refused, step_s=steep, **settings)
    assert engine.now <= 1.03 * plain.now
    assert engine.policy.stats(0, (), 0.0).num_drafts > 0
    warning = engine.policy.take_warning()
    assert warning is not None
    assert "--speculative-config: drafts would have made" in warning
    assert engine.policy.take_warning() is None


def test_the_user_hears_once_that_drafts_do_not_pay() -> None:
    off = LOSING_STEPS - 1
    controller: Any = SimpleNamespace(num_steps=off, num_steps_off=off)
    depths = AdaptiveDepths(controller)
    assert depths.take_warning() is None
    controller.num_steps = LOSING_STEPS
    warning = depths.take_warning()
    assert warning is not None
    assert f"drafts would have made {off} of {LOSING_STEPS} steps slower" in warning
    assert depths.take_warning() is None


def test_each_request_is_judged_by_itself() -> None:
    """Half of the tokens are accepted, of one request only; steps grow with every row."""
    engine = Engine(
        make_config(max_model_len=600, max_num_batched_tokens=64),
        num_blocks=1000,
        controller=Controller(MOST),
        step_s=lambda num_rows: 0.01 * (1 + 0.1 * num_rows),
    )
    engine.add(make_request("good", [1, 2, 3], max_tokens=500, seed=0))
    engine.add(make_request("bad", [1, 2, 3, 4], max_tokens=400, seed=1))
    node, seen = engine.nodes[0], {}
    draft = node._draft

    def draft_of(seq: object, at_most: int) -> list[int]:
        is_good = seq.new.num_prompt_tokens == 3  # type: ignore[attr-defined]
        node._accepts = lambda most: most if is_good else 0
        seen[is_good] = seen.get(is_good, 0) + at_most
        return draft(seq, at_most)  # type: ignore[arg-type]

    node._draft = draft_of  # type: ignore[method-assign]
    engine.finish()
    assert seen[True] > 300
    assert seen[False] < 60
