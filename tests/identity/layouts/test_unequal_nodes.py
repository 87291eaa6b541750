"""Nodes that differ in threads, seats, tokens, caches and experts serve the same tokens.

Experts of one layer differ in precision too: a token does not depend on the copy that served it.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.engine import Engine, engine_config
from tests.faults import OnDemand, faulty_nets
from tests.identity.conftest import NUM_TOKENS, CaseOf
from tests.structs import one_of_each
from topspin.plan.precision import PrecisionRule
from topspin.plan.settings import BalancePolicy
from topspin.plan.spec import EnginePlan

# Of the greatest log-probabilities: far above what one code rounded the other way changes.
MARGIN = 0.5
MIXED = (
    PrecisionRule(format="int8", part="experts", layers=(0,)),
    PrecisionRule(format="int8", part="experts", experts=(5, 7)),
    PrecisionRule(format="int4", part="experts", layers=(1,), experts=(2,)),
    PrecisionRule(format="int8", part="attention", layers=(1,)),
)


def unequal(plan: EnginePlan) -> EnginePlan:
    """Return the plan of two and two nodes with every difference that nodes can have."""
    replace = msgspec.structs.replace
    first, second = plan.attention
    large, small = plan.experts
    nodes = (
        replace(first, num_threads=2, max_num_seqs=6, kv_cache_bytes=2 * 2**20),
        replace(second, max_num_seqs=2, max_num_batched_tokens=16, kv_cache_bytes=2**19),
        replace(large, num_threads=2, experts=8),
        replace(small, experts=3),
    )
    return replace(plan, nodes=nodes)


def check(found: list[list[int]], expected: list[list[int]]) -> None:
    """Compare each stream as far as its tokens are certain."""
    assert [got[: len(want)] for got, want in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize(
    "precision",
    [pytest.param((), id="fp32", marks=pytest.mark.slow), pytest.param(MIXED, id="mixed")],
)
@pytest.mark.slow
def test_tokens_are_those_of_one_node_each_also_after_changes_and_losses(
    case_of: CaseOf, precision: tuple[PrecisionRule, ...]
) -> None:
    case = case_of("mixtral")
    plan = engine_config(
        case.path,
        attention_nodes=2,
        expert_nodes=2,
        transport="shm",
        micro_batches=None,
        balance=BalancePolicy(interval_s=0.0),
        restart=True,
        restart_deadline_s=60.0,
    )
    plan = unequal(msgspec.structs.replace(plan, precision=precision))
    expected = case.tokens
    if precision:
        with Engine(one_of_each(plan, num_experts=8)) as engine:
            expected = engine.clear_tokens(case.prompts, max_tokens=NUM_TOKENS, margin=MARGIN)
        assert sum(map(len, expected)) > 2 * len(expected)
    injectors = {("expert", 1): OnDemand(), ("attention", 1): OnDemand()}
    with faulty_nets(lambda role, index: injectors.get((role, index))), Engine(plan) as engine:
        check(engine.generate(case.prompts, max_tokens=NUM_TOKENS), expected)
        table = engine.service.formation.table
        assert [len(experts) for experts in table.slots[0]] == [8, 3]
        others = tuple((layer[0][::-1], (5, 6, 7)) for layer in table.slots)
        engine.service.balancer.ask(msgspec.structs.replace(table, slots=others))
        check(engine.generate(case.prompts, max_tokens=NUM_TOKENS), expected)
        assert engine.stats().expert_table_version == 2
        for injector in injectors.values():
            requests = engine.generate_during(case.prompts, injector.crash, max_tokens=NUM_TOKENS)
            check([each.tokens for each in requests], expected)
        lost = [text for _, text in engine.log if text.startswith("scheduler: lost")]
        assert len(lost) == 2
