"""Constrained requests through the whole engine: valid, and the same tokens in every setting.

Sampled at temperature 1 beside unconstrained requests: with drafts (forced), preemptions, and a
node that is lost in the middle.
"""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import jsonschema
import pytest
from tokenizers import pre_tokenizers

from attention_nodes.grammars.processes import CompiledGrammar, Grammars
from models.text.tokenizer import Tokenizer
from server.gateway.grammars.structured_outputs import json_grammar
from tests.checkpoints import EOS_TOKEN_ID
from tests.engine import Collected, Engine, engine_config
from tests.faults import faulty_node
from tests.identity.conftest import Case, CaseOf, crowded_config
from tests.identity.speculation.test_speculation import CHAINS, TREES, accepted
from topspin.plan.speculation import Speculation

VARIANT = "qwen3_moe"
MAX_TOKENS = 48
SCHEMA = {
    "type": "array",
    "minItems": 2,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"k": {"enum": ["a", "the", "in"]}, "n": {"type": "integer", "maximum": 99}},
        "required": ["k"],
        "additionalProperties": False,
    },
}
REGEX = "[ab]{14,18}( the)?"
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # as tests.checkpoints' tokens
A, B = _ALPHABET.index("a"), _ALPHABET.index("b")
# A random model would fill the answer with them.
NO_BLANKS = {_ALPHABET.index(chr(256 + ord(blank))): -50.0 for blank in " \n\t"}


def asked() -> list[dict[str, Any]]:
    """The sampling parameters of each request."""
    ends = {"eos_token_ids": (EOS_TOKEN_ID,), "temperature": 1.0, "max_tokens": MAX_TOKENS}
    schema = json_grammar(SCHEMA, param="schema")
    return [
        {**ends, "grammar": schema, "seed": 1, "logit_bias": NO_BLANKS},
        {**ends, "grammar": f"start: /{REGEX}/", "seed": 2},
        {"temperature": 1.0, "max_tokens": 24, "seed": 3},
        {**ends, "grammar": schema, "seed": 4, "logit_bias": NO_BLANKS, "min_p": 0.01},
        {**ends, "grammar": f"start: /{REGEX}/", "seed": 5, "bad_words": ((B,),)},
        {**ends, "allowed_token_ids": (5, 6, 7, 8), "seed": 6, "max_tokens": 24},
    ]


def send(engine: Engine, case: Case) -> list[Collected]:
    prompts = case.prompts[: len(asked())]
    ids = [engine.add(p, **each) for p, each in zip(prompts, asked(), strict=True)]
    return [engine.requests[each] for each in ids]


def run(engine: Engine, case: Case) -> list[list[int]]:
    requests = send(engine, case)
    engine.collect()
    assert [each.failed for each in requests] == [None] * len(requests)
    return [each.tokens for each in requests]


@pytest.fixture(scope="module")
def expected(case_of: CaseOf) -> list[list[int]]:
    """The tokens of an undisturbed run, all of them valid."""
    case = case_of(VARIANT)
    with Engine(engine_config(case.path)) as engine:
        outputs = run(engine, case)
        stats = engine.stats()
    assert (stats.num_grammars_compiled, stats.num_grammars_found) == (2, 2)
    tokenizer = Tokenizer.from_directory(case.path)
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in outputs]
    for idx in (0, 3):
        jsonschema.validate(json.loads(texts[idx]), SCHEMA)
    assert all(re.fullmatch(REGEX, texts[idx]) for idx in (1, 4))
    assert "b" not in texts[4]
    assert set(outputs[5]) <= {5, 6, 7, 8}
    ended = [tokens[-1] == EOS_TOKEN_ID for tokens in outputs]
    assert [ended[idx] for idx in (0, 1, 3, 4, 5)] == [True, True, True, True, False]
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "topology", "micro_batches", "speculation"),
    [
        ("local", (1, 1), 1, CHAINS),
        ("tcp", (1, 2), 2, TREES),
    ],
)
def test_tokens_are_the_same_with_drafts_and_on_every_layout(
    case_of: CaseOf,
    expected: list[list[int]],
    transport: Any,
    topology: tuple[int, int],
    micro_batches: int,
    speculation: Speculation | None,
) -> None:
    case = case_of(VARIANT)
    config = engine_config(
        case.path,
        transport=transport,
        attention_nodes=topology[0],
        expert_nodes=topology[1],
        micro_batches=micro_batches,
        speculation=speculation,
    )
    with Engine(config) as engine:
        # The second time the drafter has seen the answers.
        for _ in range(2):
            assert run(engine, case) == expected
        stats = engine.stats()
    assert (accepted(stats) > 20) == (speculation is not None)


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [None, TREES], ids=["plain", "trees"])
def test_a_preempted_sequence_goes_on_in_its_grammar(
    case_of: CaseOf, expected: list[list[int]], speculation: Speculation | None
) -> None:
    case = case_of(VARIANT)
    config = crowded_config(case, most=MAX_TOKENS, transport="shm", speculation=speculation)
    with Engine(config) as engine:
        # The first time they may come one after the other, as their grammars are compiled.
        for _ in range(2):
            assert run(engine, case) == expected
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("role", ["attention", pytest.param("expert", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_lost_node_changes_no_bit(case_of: CaseOf, role: str) -> None:
    case = case_of(VARIANT)
    config = engine_config(
        case.path,
        deterministic=True,
        transport="tcp",
        attention_nodes=2,
        expert_nodes=2,
        deadline_s=0.5,
        restart=True,
        restart_deadline_s=60.0,
    )

    with faulty_node(role, 0) as injector, Engine(config) as engine:
        undisturbed = run(engine, case)
        requests = send(engine, case)
        engine.collect(until=lambda: all(len(each.tokens) >= 3 for each in requests))
        assert not any(each.ended for each in requests)
        injector.crash()
        engine.collect()
        assert injector.num_injected == 1
        assert engine.stats().num_replays > 0
        assert [each.failed for each in requests] == [None] * len(requests)
        assert [each.tokens for each in requests] == undisturbed


@pytest.mark.slow
def test_no_stream_waits_for_a_compilation(
    case_of: CaseOf, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compilation ends only after another stream has been served from its first token on."""
    case = case_of(VARIANT)
    may_end = threading.Event()
    take_compiled = Grammars.take_compiled

    def slow(self: Grammars) -> list[CompiledGrammar]:
        return take_compiled(self) if may_end.is_set() else []

    def refused(*_: Any) -> None:
        raise AssertionError("a step compiles")

    monkeypatch.setattr(Grammars, "take_compiled", slow)
    monkeypatch.setattr(Grammars, "_compiled_now", refused)
    with Engine(engine_config(case.path)) as engine:
        requests = send(engine, case)
        free = [idx for idx, each in enumerate(asked()) if "grammar" not in each]
        engine.collect(until=lambda: all(requests[idx].ended for idx in free))
        assert [requests[idx].tokens for idx in free] == [expected[idx] for idx in free]
        assert all(not each.tokens for idx, each in enumerate(requests) if idx not in free)
        may_end.set()
        engine.collect()
        assert [each.tokens for each in requests] == expected


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"grammar": "start: nothing"}, "unknown name"),
    ({"grammar": "start: /a+/", "eos_token_ids": ()}, "ignore_eos"),
    ({"grammar": "start: /[0-9]/", "allowed_token_ids": (A,)}, "leave no token"),
]


@pytest.mark.slow
def test_a_request_that_cannot_be_followed_fails_alone_with_the_reason(
    case_of: CaseOf, expected: list[list[int]]
) -> None:
    case = case_of(VARIANT)
    with Engine(engine_config(case.path)) as engine:
        requests = send(engine, case)
        ids = [
            engine.add([1, 2], **{"eos_token_ids": (EOS_TOKEN_ID,), **each}) for each, _ in REFUSALS
        ]
        engine.collect()
        for each, (_, reason) in zip(ids, REFUSALS, strict=True):
            failed = engine.requests[each].failed
            assert failed is not None
            assert failed.status == 400
            assert reason in failed.message
        assert [each.tokens for each in requests] == expected
