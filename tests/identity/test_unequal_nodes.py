"""Nodes that differ in threads, seats, tokens, caches and experts serve the same tokens."""

from __future__ import annotations

import msgspec

from tests.engine import Engine, engine_config
from tests.identity.conftest import NUM_TOKENS, CaseOf
from topspin.config import BalanceSection, FailoverSection
from topspin.plan import EnginePlan


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


def test_tokens_are_transformers_also_after_tables_change_and_a_node_is_lost(
    case_of: CaseOf,
) -> None:
    case = case_of("mixtral")
    plan = unequal(
        engine_config(
            case.path,
            attention_nodes=2,
            expert_nodes=2,
            transport="shm",
            micro_batches=None,
            balance=BalanceSection(interval_s=0.0),
            failover=FailoverSection(restart=True, restart_deadline_s=60.0),
        )
    )
    with Engine(plan) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        table = engine.service.formation.table
        assert [len(experts) for experts in table.slots[0]] == [8, 3]
        others = tuple((layer[0][::-1], (5, 6, 7)) for layer in table.slots)
        engine.service.request_balance(msgspec.structs.replace(table, slots=others))
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        assert engine.stats().expert_table_version == 2
