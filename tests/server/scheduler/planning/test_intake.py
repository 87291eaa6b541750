"""The limits of a request, for any gateway."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from server.scheduler.planning.intake import Intake
from server.scheduler.planning.sequence import Request
from tests.mutations import damaged
from topspin.errors import InvalidRequest, ProtocolError
from topspin.messages import AddRequest, SamplingParams, decode, encode, pack_ints
from topspin.plan.kv_cache import BlockNeeds

VOCAB = 64
NEEDS = BlockNeeds(block_size=4, max_step_tokens=8)
INTAKE = Intake(vocab_size=VOCAB, needs=NEEDS, max_model_len=32, max_request_tokens=32)


def take(**sampling: Any) -> Request:
    fields = {"max_tokens": 8, "seed": 0, **sampling}
    message = AddRequest(
        request_id="r", prompt=pack_ints([1, 2, 3]), sampling=SamplingParams(**fields)
    )
    return INTAKE.request(message, peer=b"gateway", arrival=0)


OUTSIDE = [
    ("max_tokens", (-1, 2**31)),
    ("min_tokens", (-1, 2**63)),
    ("seed", (-1, 2**64)),
    ("choice", (-1, 2**31)),
    ("temperature", (-0.1, 2.1, 1e39, math.nan, math.inf)),
    ("top_p", (-0.1, 1.1, math.nan)),
    ("top_k", (-1, 2**63)),
    ("min_p", (-0.1, 1.1, math.nan)),
    ("presence_penalty", (-2.1, 2.1, math.nan, -math.inf)),
    ("frequency_penalty", (-2.1, 2.1, math.nan, 1e300)),
    ("repetition_penalty", (0.0, 1e-38, -1.0, 100.1, math.nan, math.inf)),
    ("logprobs", (-1, 10_000)),
    ("prompt_logprobs", (-1, 10_000)),
    ("logit_bias", ({1: 100.1}, {1: math.nan}, {1: -math.inf}, {-1: 0.0}, {0: 1.0, VOCAB: 0.0})),
    ("stop_token_ids", ((-1,), (0, VOCAB))),
    ("eos_token_ids", ((-1,), (0, VOCAB))),
]


def test_a_parameter_out_of_range_is_the_requests_own_fault() -> None:
    for param, values in OUTSIDE:
        for value in values:
            with pytest.raises(InvalidRequest, match=param) as caught:
                take(**{param: value})
            assert caught.value.param == param, value


def test_the_ends_of_the_ranges_are_served() -> None:
    highest = {
        "max_tokens": 2**31 - 1,
        "min_tokens": 2**31 - 1,
        "seed": 2**64 - 1,
        "temperature": 2.0,
        "top_p": 1.0,
        "top_k": 2**31 - 1,
        "min_p": 1.0,
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 100.0,
        "logprobs": 20,
        "logit_bias": {VOCAB - 1: 100.0},
        "stop_token_ids": (VOCAB - 1,),
        "eos_token_ids": (VOCAB - 1, 0),
    }
    assert take(**highest).stop_ids == {0, VOCAB - 1}
    lowest = {
        "temperature": 0.0,
        "top_p": 0.0,
        "presence_penalty": -2.0,
        "frequency_penalty": -2.0,
        "repetition_penalty": 0.01,
        "logit_bias": {0: -100.0},
    }
    assert take(max_tokens=1, **lowest).max_length == 4


def test_a_prompt_without_output_may_fill_the_context() -> None:
    request = AddRequest(
        request_id="r",
        prompt=pack_ints([1] * 32),
        sampling=SamplingParams(max_tokens=0, seed=0, prompt_logprobs=0),
    )
    taken = INTAKE.request(request, peer=b"gateway", arrival=0)
    assert (taken.max_length, taken.position_limit, taken.max_blocks) == (32, 32, 8)
    assert taken.num_to_score == 31
    with_output = msgspec.structs.replace(request, sampling=SamplingParams(max_tokens=1, seed=0))
    with pytest.raises(InvalidRequest, match="leaves no room for output"):
        INTAKE.request(with_output, peer=b"gateway", arrival=0)


def test_what_another_scheduler_delivered_is_no_prompt_and_has_its_limits() -> None:
    sampling = SamplingParams(max_tokens=4, seed=0, prompt_logprobs=0)
    begun = AddRequest(
        request_id="r",
        prompt=pack_ints([1, 2, 3]),
        sampling=sampling,
        output=pack_ints([4, 5]),
        num_scored=2,
    )
    taken = INTAKE.request(begun, peer=b"gateway", arrival=0)
    assert list(taken.tokens) == [1, 2, 3, 4, 5]
    assert (taken.num_prompt_tokens, taken.num_output_tokens, taken.num_scored) == (3, 2, 2)
    assert taken.max_length == 7
    for changes, param in (
        ({"output": pack_ints([4, VOCAB])}, "output"),
        ({"output": b"123"}, "output"),
        ({"output": pack_ints([4] * 4)}, "output"),
        ({"num_scored": 3}, "num_scored"),
        ({"num_scored": -1}, "num_scored"),
    ):
        with pytest.raises(InvalidRequest, match=param):
            INTAKE.request(msgspec.structs.replace(begun, **changes), peer=b"", arrival=0)


ADDED = [
    encode(
        AddRequest(
            request_id="r#1-0",
            prompt=pack_ints([1, 2, 3]),
            sampling=SamplingParams(
                max_tokens=8,
                seed=5,
                top_p=0.5,
                logit_bias={1: -2.5},
                stop_token_ids=(3,),
                eos_token_ids=(0,),
                logprobs=2,
                grammar=grammar,
                bad_words=((1, 2),),
            ),
            cache_salt="t",
            output=pack_ints([7]),
        )
    )
    for grammar in ("", "start: /a/")
]


@settings(max_examples=150)
@given(damaged(ADDED))
def test_any_request_of_a_gateway_is_taken_within_its_limits_or_refused(data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError:
        return
    if not isinstance(message, AddRequest):
        return
    try:
        taken = INTAKE.request(message, peer=b"gateway", arrival=0)
    except InvalidRequest:
        return
    assert 0 < taken.num_prompt_tokens <= taken.max_length <= 32
    assert all(0 <= token < VOCAB for token in taken.tokens)
    taken.hashes.first(taken.num_prompt_tokens // 4, taken.tokens)
