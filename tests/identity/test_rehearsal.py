"""An engine with an expected plan compares itself at start, names the slow node, and then serves.

What it serves are the tokens of an engine that has measured nothing.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.engine import Engine, engine_config
from tests.identity.conftest import NUM_TOKENS, Case, CaseOf
from topspin.plan.expected import Expected, ExpectedStep
from topspin.plan.spec import EnginePlan


def step(rows: int, context: float, *, micro_batches: int = 1) -> ExpectedStep:
    return ExpectedStep(
        rows=rows,
        context=context,
        micro_batches=micro_batches,
        attention_s=1e-4,
        experts_s=1e-4,
        link_s=1e-5,
        step_s=2e-3,
    )


def expecting(plan: EnginePlan, decode: ExpectedStep, prefill: ExpectedStep) -> EnginePlan:
    expected = Expected(decode=decode, prefill=prefill, ttft_s=0.1, tpot_s=0.01, tokens_per_s=1.0)
    return msgspec.structs.replace(plan, expected=expected)


def slowed(plan: EnginePlan, name: str) -> EnginePlan:
    nodes = [
        msgspec.structs.replace(node, slow=40.0) if str(node) == name else node
        for node in plan.nodes
    ]
    return msgspec.structs.replace(plan, nodes=tuple(nodes))


def check(plan: EnginePlan, case: Case) -> str:
    """Return the line of the comparison, once the engine has served the right tokens."""
    with Engine(plan) as engine:
        assert any("comparing the engine with its plan" in each for each in engine.details)
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        ratios = engine.stats().plan_ratios
        assert ratios.keys() == {"decode", "prefill"}
        for parts in ratios.values():
            assert parts.keys() >= {"step", "attention", "experts"}
            assert min(parts[each] for each in ("step", "attention", "experts")) > 0
        assert engine.stats().generation_tokens == sum(map(len, case.tokens))
        (line,) = [text for _, text in engine.log if "plan off by" in text or "as expected" in text]
    return line


@pytest.mark.parametrize("name", ["expert 1", pytest.param("attention 0", marks=pytest.mark.slow)])
def test_the_node_that_is_too_slow_is_named(case_of: CaseOf, name: str) -> None:
    case = case_of("qwen3_moe")
    case = case._replace(prompts=case.prompts[:3], tokens=case.tokens[:3])
    plan = engine_config(
        case.path,
        attention_nodes=2,
        expert_nodes=2,
        transport="shm",
        micro_batches=None,
        max_num_batched_tokens=32,
    )
    line = check(slowed(expecting(plan, step(8, 20.5, micro_batches=2), step(40, 9.0)), name), case)
    assert "plan off by +" in line
    assert f"({name}: " in line
    assert "x the other nodes)" in line


@pytest.mark.slow
def test_one_process_is_compared_too(case_of: CaseOf) -> None:
    case = case_of("qwen3_moe")
    plan = engine_config(case.path, attention_nodes=2, expert_nodes=2, transport="local")
    check(expecting(plan, step(5, 0.0), step(20, 2.0)), case)


def test_a_step_that_has_no_room_is_not_measured(case_of: CaseOf) -> None:
    case = case_of("qwen3_moe")
    plan = engine_config(case.path, transport="shm")
    with Engine(expecting(plan, step(10_000, 5.0), step(10_000, 5.0))) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        assert engine.stats().plan_ratios == {}
        assert any("was not measured" in text for _, text in engine.log)
