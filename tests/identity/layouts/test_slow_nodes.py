"""Nodes that emulate slower devices give the same tokens, later, and report the time they took."""

from __future__ import annotations

import bisect
import math
import time
from itertools import accumulate
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from kernels.cpu.compiled.matmul.linear import block_width
from kernels.cpu.compiled.program import Program
from tests.checkpoints import make_checkpoint
from tests.engine import Engine, engine_config
from tests.structs import with_nodes
from topspin.messages.requests import STEP_BUCKETS_S
from topspin.plan.settings import BalancePolicy
from topspin.plan.spec import EnginePlan
from topspin.plan.speculation import Speculation

pytestmark = pytest.mark.skipif(
    not block_width(), reason="this processor leaves bf16 products to oneDNN"
)

PROMPTS = [[7, 3, 9, 200, 4], [17] * 8, [5]]
NUM_TOKENS = 16
# Enough for a mean that one late thread does not make.
NUM_PASSES = 20
NUM_EXPERTS = 8
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 128}
DRAFTS = Speculation(method="draft_model", model="self-int4", num_speculative_tokens=3)
SLOW = 20.0


def slowed(plan: EnginePlan, name: str, slow: float = SLOW) -> EnginePlan:
    """Return `plan` with one slow node."""
    nodes = tuple(
        msgspec.structs.replace(node, slow=slow) if str(node) == name else node
        for node in plan.nodes
    )
    assert nodes != plan.nodes
    return msgspec.structs.replace(plan, nodes=nodes)


def run(plan: EnginePlan) -> tuple[list[list[int]], dict[str, float], int]:
    """Return the tokens, seconds by phase of the median step, and how often a program ran."""
    runs, real = [], Program.run

    def counted(program: Program) -> None:
        runs.append(program)
        real(program)

    with mock.patch.object(Program, "run", counted), Engine(plan) as engine:
        tokens = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
        while (stats := engine.stats()).num_draft_passes < NUM_PASSES and plan.drafts:
            engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    # On a busy machine some steps have waited for a core, which is not slowed down; in others the
    # node had no rows.
    seconds = {
        name: bisect.bisect_left(list(accumulate(each.counts)), sum(each.counts) / 2)
        for name, each in stats.step_phases.items()
        if any(each.counts)
    }
    seconds = {name: (*STEP_BUCKETS_S, math.inf)[idx] for name, idx in seconds.items()}
    seconds["pass"] = stats.draft_pass_seconds / max(1, stats.num_draft_passes)
    return tokens, seconds, len(runs)


@pytest.mark.slow
def test_a_slow_node_gives_the_same_tokens_and_reports_its_time(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe", **SIZES)
    plan = engine_config(path, dtype="bfloat16", expert_nodes=2, transport="shm", window_rows=64)
    tokens, usual, _ = run(plan)
    for name, phase in (("expert 1", "expert"), ("attention 0", "attention")):
        found, seconds, programs = run(slowed(plan, name, 10 * SLOW))
        assert found == tokens
        assert programs > NUM_TOKENS
        # Much of a tiny model's step is Python, which is not slowed down.
        assert seconds[phase] > 2 * usual[phase]


@pytest.mark.slow
def test_a_slow_draft_node_gives_the_same_tokens(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe", **SIZES)
    plan = engine_config(path, dtype="bfloat16", transport="shm", speculation=DRAFTS, draft_nodes=1)
    tokens, usual, _ = run(plan)
    found, seconds, _ = run(slowed(plan, "draft 0"))
    assert found == tokens
    assert seconds["pass"] > 2 * usual["pass"]


@pytest.mark.slow
def test_a_table_by_speed_decodes_faster(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 512, "moe_intermediate_size": 2048}
    path = make_checkpoint(tmp_path, "qwen3_moe", **sizes)
    plan = slowed(
        engine_config(
            path,
            dtype="bfloat16",
            expert_nodes=2,
            transport="shm",
            window_rows=64,
            balance=BalancePolicy(interval_s=0.0),
        ),
        "expert 1",
    )
    plan = with_nodes(plan, "expert", experts=NUM_EXPERTS)  # each holds them all
    with Engine(plan) as engine:

        def fastest_s() -> float:
            times = []
            for _ in range(5):
                began = time.monotonic()
                engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
                times.append(time.monotonic() - began)
            return min(times)

        engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
        uniform_s = fastest_s()
        while engine.service.balancer.load.speeds() is None:
            engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
        engine.service.balancer.ask()
        while engine.stats().expert_table_version == 1:
            engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
        fast, slow = engine.service.formation.table.speeds
        assert fast == 1.0
        assert slow < 0.5
        engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
        assert fastest_s() < 0.8 * uniform_s
