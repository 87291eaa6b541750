"""Nodes' results: what reaches which request, and those that do not fit the plan."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.scheduler.planning.policy import Policy
from tests.server.scheduler.engine import make_config, make_policy, make_request
from tests.server.scheduler.fake_nodes import TIMINGS, score
from topspin.errors import ProtocolError
from topspin.messages import (
    SAMPLE,
    SCORE,
    Outputs,
    StepResult,
    TokenLogprobs,
    pack_ints,
)

FIRST = StepResult(
    step=1,
    generation=1,
    index=0,
    seq_ids=pack_ints([1, 2]),
    tokens=pack_ints([7, 8]),
    timings=TIMINGS,
    prompt_logprobs={2: (score([3, 4, 5], 1), score([3, 4, 5], 2))},
)


@pytest.fixture
def policy() -> Policy:
    """Return a policy whose first step has two prompts, the second of which wants scores."""
    policy = make_policy(make_config(), draft_tokens=lambda request: 2)
    first = make_request("r", [1, 2], max_tokens=9, seed=0)
    policy.add(first, peer=b"one", now=0.0)
    second = make_request("r", [3, 4, 5], max_tokens=9, seed=1, prompt_logprobs=0, logprobs=1)
    policy.add(second, peer=b"two", now=0.0)
    step = policy.schedule(0.0)
    assert step is not None
    assert list(step.plans[0].micro_batches[0].wanted) == [SAMPLE, SAMPLE | SCORE]
    return policy


def test_outputs_go_to_the_gateway_that_asked_with_what_it_asked_for(policy: Policy) -> None:
    logprobs = (TokenLogprobs(logprob=-0.5, top_ids=(8,), top_logprobs=(-0.5,)),)
    result = msgspec.structs.replace(FIRST, logprobs={1: logprobs, 2: logprobs})
    found = {}
    for peer, message in policy.update(result, 1.0):
        assert isinstance(message, Outputs)
        (output,) = message.outputs
        found[peer] = output.token_ids, output.logprobs
    assert found == {b"one": ((7,), ()), b"two": ((8,), logprobs)}


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": pack_ints([1, 1])},
        {"seq_ids": pack_ints([1]), "tokens": pack_ints([7]), "errors": {2: "x"}}
        | {"prompt_logprobs": {}},
    ],
)
def test_answers_that_fit_are_taken(policy: Policy, changes: dict[str, Any]) -> None:
    assert list(policy.update(msgspec.structs.replace(FIRST, **changes), 0.0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": 2}, "step 2 .* which is not running"),
        ({"generation": 9}, "which is not running"),
        ({"index": 1}, "was not awaited"),
        ({"seq_ids": b"", "tokens": b""}, "does not name the sequences"),
        ({"seq_ids": pack_ints([1, 2, 3]), "tokens": pack_ints([5] * 3)}, "does not name"),
        ({"seq_ids": pack_ints([1, 1])}, "2 tokens for 2 sequences"),
        ({"tokens": pack_ints([5])}, "1 tokens for 2 sequences"),
        ({"tokens": pack_ints([5, 5, 5])}, "3 tokens for 2 sequences"),
        ({"tokens": b"abc"}, "multiple of 4"),
        ({"errors": {3: "unknown"}}, "does not name"),
        ({"counts": pack_ints([1])}, "2 tokens for 2 sequences"),
        ({"counts": pack_ints([3, -1])}, "2 tokens for 2 sequences"),
        ({"counts": pack_ints([0, 2])}, "0 tokens for sequence 1, where 1 to 1 are possible"),
        ({"counts": pack_ints([1, 2]), "tokens": pack_ints([7, 8, 9])}, "2 tokens for sequence 2"),
        ({"prompt_logprobs": {}}, "by sequence: {}, where {2: 2} were wanted"),
        ({"prompt_logprobs": {1: (score([1, 2], 1),)}}, "{1: 1}, where {2: 2}"),
        ({"prompt_logprobs": {2: (score([3, 4], 1),)}}, "{2: 1}, where {2: 2}"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused_and_changes_nothing(
    policy: Policy, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ProtocolError, match=reason):
        policy.update(msgspec.structs.replace(FIRST, **changes), 0.0)
    policy.check_integrity()
    assert len(list(policy.update(FIRST, 0.0))) == 2
    with pytest.raises(ProtocolError):
        policy.update(FIRST, 0.0)


@pytest.mark.parametrize(
    ("drafted", "count", "reason"),
    [
        ([3, 0], 1, "3 tokens in the draft of sequence 1, where 2 were planned"),
        ([-1, 0], 1, "-1 tokens in the draft of sequence 1"),
        ([1], 1, "1 drafts for 2 sequences"),
        ([1, 0], 3, "3 tokens for sequence 1, where 1 to 2 are possible"),
        ([], 2, "2 tokens for sequence 1, where 1 to 1 are possible"),
    ],
)
def test_a_draft_that_was_not_planned_is_refused(
    policy: Policy, drafted: list[int], count: int, reason: str
) -> None:
    assert policy.schedule(0.0) is not None
    policy.update(FIRST, 0.0)
    right = msgspec.structs.replace(FIRST, step=2, prompt_logprobs={})
    wrong = msgspec.structs.replace(
        right,
        tokens=pack_ints([7] * (count + 1)),
        counts=pack_ints([count, 1]),
        drafted=pack_ints(drafted),
    )
    with pytest.raises(ProtocolError, match=reason):
        policy.update(wrong, 0.0)
    policy.check_integrity()
    assert list(policy.update(right, 0.0))
