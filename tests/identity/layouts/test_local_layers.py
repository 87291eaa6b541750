"""Layers whose routed experts stay on the attention nodes: the same tokens as when rows travel.

All layers local, some, and none, switched while requests run, on every transport and with recorded
steps; against transformers in fp32, and bit for bit under --deterministic.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal
from unittest import mock

import msgspec
import pytest

from kernels.cpu.compiled.program import Program
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint
from tests.engine import Collected, Engine, engine_config
from tests.identity.conftest import NUM_TOKENS, Case, CaseOf
from tests.identity.speculation.test_draft_model import TREES, speculation_of
from tests.identity.speculation.test_speculation import accepted
from tests.identity.test_deterministic import ask
from tests.identity.test_devices import ATTENTION_ON_IT, MAX_NUM_SEQS, ON_ONE, prompts_of
from topspin.plan.local_experts import LocalExperts
from topspin.plan.rules.checks import check_plan
from topspin.plan.spec import EnginePlan

slow = pytest.mark.slow
# A shared expert and a dense layer between MoE layers.
VARIANT = "qwen2_moe"


def plan_of(
    case: Case,
    *,
    when: Literal["always", "measured"],
    share: float = 1.0,
    **settings: Any,
) -> EnginePlan:
    """Return a plan that names the last `share` of the MoE layers."""
    moe_layers = load_model_config(case.path).moe_layers
    layers = moe_layers[len(moe_layers) - max(1, round(share * len(moe_layers))) :]
    plan = engine_config(case.path, **settings)
    local = LocalExperts(layers=layers, when=when)
    if when == "always" and layers == moe_layers:
        plan = msgspec.structs.replace(plan, nodes=tuple(plan.attention))
    plan = msgspec.structs.replace(plan, local_experts=local)
    check_plan(plan)
    return plan


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("mixtral", {"transport": "local"}),
        pytest.param(
            VARIANT, {"transport": "shm", "attention_nodes": 2, "micro_batches": 4}, marks=slow
        ),
    ],
)
@pytest.mark.slow
def test_all_layers_always(case_of: CaseOf, variant: str, settings: dict[str, Any]) -> None:
    """Some layers: test_matrix.py."""
    case = case_of(variant)
    plan = plan_of(case, when="always", **settings)
    assert not plan.experts
    with Engine(plan) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        table = engine.service.formation.table
        assert len(table.local) == len(table.slots)
        assert not any(any(table.slots[layer]) for layer in table.local)  # nobody else could serve


def switch_until(engine: Engine, case: Case, versions: int) -> None:
    """Generate all prompts, switching all the time, until so many tables were in use."""
    engine.service.local_layers = None
    balancer, formation = engine.service.balancer, engine.service.formation
    named = tuple(range(len(formation.table.slots)))
    kinds = itertools.cycle((named, (), named[1:], named[:1]))
    seen = set()

    def switch(requests: list[Collected]) -> bool:
        seen.add(formation.table.local)
        if not balancer.is_changing:
            balancer.keep_local(next(kinds))
        return all(each.ended for each in requests)

    while formation.table.version < versions or len(seen) < 4:
        ids = [engine.add(prompt, max_tokens=NUM_TOKENS) for prompt in case.prompts]
        requests = [engine.requests[each] for each in ids]
        engine.collect(until=lambda requests=requests: switch(requests))
        assert [each.tokens for each in requests] == case.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        (VARIANT, {"transport": "shm", "attention_nodes": 2, "expert_nodes": 2}),
        ("mixtral", {"transport": "local", "latency_us": 20.0, "attention_nodes": 2}),
        ("olmoe", {"transport": "local", "recordings": False}),
        ("qwen3_moe", {"transport": "tcp", "micro_batches": 4}),
    ],
)
def test_switched_while_requests_run(
    case_of: CaseOf, variant: str, settings: dict[str, Any]
) -> None:
    case = case_of(variant)
    with Engine(plan_of(case, when="measured", **settings)) as engine:
        switch_until(engine, case, versions=9)


@pytest.mark.parametrize(
    ("dtype", "attention_nodes", "micro_batches"),
    [("bfloat16", 2, 2), ("float32", 1, 3)],
)
@slow
def test_the_same_bits(
    case_of: CaseOf, dtype: str, attention_nodes: int, micro_batches: int
) -> None:
    """Every log-probability, with experts far away, here, and while that changes."""
    case = case_of(VARIANT)
    settings: dict[str, Any] = {"deterministic": True, "dtype": dtype, "transport": "shm"}
    with Engine(engine_config(case.path, **settings)) as engine:
        remote = ask(engine, case.prompts)
    settings |= {"attention_nodes": attention_nodes, "micro_batches": micro_batches}
    with Engine(plan_of(case, when="always", **settings)) as engine:
        assert ask(engine, case.prompts) == remote
    with Engine(plan_of(case, when="measured", expert_nodes=3, **settings)) as engine:
        engine.service.local_layers = None
        for local in ((1,), (0, 1), ()):
            engine.service.balancer.keep_local(local)
            while engine.service.balancer.is_changing:
                assert ask(engine, case.prompts) == remote
            assert engine.service.formation.table.local == local
            assert ask(engine, case.prompts[:3]) == remote[:3]


@slow
def test_on_a_device(case_of: CaseOf) -> None:
    """Triton's kernels, interpreted where there is no GPU; some layers are local."""
    case = case_of(VARIANT)
    chosen = prompts_of(case)[:MAX_NUM_SEQS]
    settings: dict[str, Any] = {"transport": "shm", "max_num_seqs": MAX_NUM_SEQS}
    plan = plan_of(case, when="always", share=0.5, **ATTENTION_ON_IT, **settings)
    with Engine(plan) as engine:
        got = engine.generate([case.prompts[idx] for idx in chosen], max_tokens=3)
    assert got == [case.tokens[idx][:3] for idx in chosen]


@slow
@pytest.mark.parametrize("settings", [ON_ONE, {**ON_ONE, "recordings": False}])
def test_all_on_one_device(case_of: CaseOf, settings: dict[str, Any]) -> None:
    case = case_of("mixtral")
    chosen = prompts_of(case)[:MAX_NUM_SEQS]
    for share in (0.5, 1.0):
        plan = plan_of(case, when="always", share=share, **settings, max_num_seqs=MAX_NUM_SEQS)
        with Engine(plan) as engine:
            got = engine.generate([case.prompts[idx] for idx in chosen], max_tokens=4)
        assert got == [case.tokens[idx][:4] for idx in chosen]


def test_local_steps_are_recorded(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """A recording of steps in which rows travel is not replayed for others; nor the reverse."""
    caplog.set_level("INFO", "recordings")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64}
    path = make_checkpoint(tmp_path_factory.mktemp("recorded"), "qwen3_moe", **sizes)
    case = Case(path, [[5, 9, 2], [7] * 9], [])
    runs = 0
    real = Program.run

    def counted(program: Program) -> None:
        nonlocal runs
        runs += 1
        real(program)

    found = []
    with (
        mock.patch.object(Program, "run", counted),
        Engine(plan_of(case, when="measured", transport="shm", dtype="bfloat16")) as engine,
    ):
        engine.service.local_layers = None
        num_layers = len(engine.service.formation.table.slots)
        for local in ((), tuple(range(num_layers)), (1,)):
            engine.service.balancer.keep_local(local)
            while engine.service.balancer.is_changing:
                engine.generate(case.prompts, max_tokens=2)
            before = runs
            tokens = [engine.generate(case.prompts, max_tokens=NUM_TOKENS) for _ in range(2)][1]
            found.append((engine.service.formation.table.local, tokens, runs - before))
    (_, remote, _), (_, here, _), (mixed, both, _) = found
    assert mixed == (1,)
    assert remote == here == both
    assert all(count > NUM_TOKENS for _, _, count in found)
    assert "not recorded" not in caplog.text


@pytest.mark.slow
def test_trees_of_drafts(case_of: CaseOf) -> None:
    """A perfect draft's trees are verified while layers become local and travel again."""
    case = case_of("qwen3_moe")
    settings: dict[str, Any] = {
        "transport": "shm",
        "speculation": speculation_of(case.path, **TREES),
    }
    with Engine(plan_of(case, when="measured", **settings)) as engine:
        switch_until(engine, case, versions=6)
        assert accepted(engine.stats()) > 0
