"""Every weight in a format of its own: tokens do not depend on the node that served them.

The oracle is transformers' fp32 model with the products of the quantised kernels, weight by weight
(quantization.patched). Nodes hold different numbers of experts in several formats;
tables move experts and copies, and a node is lost and returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.quality.quantization import patched
from kernels.dispatch import select_ops
from models.description.config import load_model_config
from models.description.facts import facts_of
from tests.checkpoints import VOCAB_SIZE, make_checkpoint, oracle_model
from tests.engine import Collected, Engine, engine_config
from tests.faults import faulty_node
from tests.identity.weights.test_expert_tables import NUM_EXPERTS, only_copies, random_tables
from tests.identity.weights.test_quantised import PROMPT_LENS, clear_tokens
from topspin.plan.precision import PrecisionRule, Rules
from topspin.plan.rules.checks import check_model, check_plan
from topspin.plan.spec import EnginePlan, ExpertNode

NUM_STEPS = 8
# Three tables are ready sooner, unless the machine is busy.
MAX_ROUNDS = 50
# In log-probabilities. A number between two codes may be rounded either way, which moves them less;
# one expert in another format moves each by 0.1 or more.
TOLERANCE = 0.05


class Answer(NamedTuple):
    """A greedy continuation, and before each token the log-probabilities [V] of all."""

    tokens: list[int]
    logprobs: list[NDArray[np.float64]]


def rules_for(path: Path) -> Rules:
    """Return rules by which layers, parts and experts of a layer differ."""
    model = load_model_config(path)
    first, last = model.moe_layers[0], model.moe_layers[-1]
    return (
        PrecisionRule(format="int8"),
        PrecisionRule(format="int4", layers=(first,)),
        PrecisionRule(format="int8", part="experts", layers=(first,), experts=(1, 6)),
        PrecisionRule(format="none", part="experts", layers=(first,), experts=(3,)),
        PrecisionRule(format="none", part="attention", layers=(last,)),
        PrecisionRule(format="int4", part="experts", layers=(last,), experts=(0, 2, 5)),
    )


@pytest.fixture
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, getattr(request, "param", "qwen3_moe"))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB_SIZE, size=length).tolist() for length in PROMPT_LENS]


ASKED: dict[str, Any] = {"max_tokens": NUM_STEPS, "logprobs": VOCAB_SIZE}


def answers(requests: list[Collected]) -> list[Answer]:
    """Return the answers of requests that have ended."""
    found = []
    for request in requests:
        rows = [np.empty(VOCAB_SIZE) for _ in request.tokens]
        for row, each in zip(rows, request.logprobs, strict=True):
            row[list(each.top_ids)] = each.top_logprobs
        found.append(Answer(request.tokens, rows))
    return found


def ask(engine: Engine, event: Callable[[], object] = lambda: None) -> list[Answer]:
    return answers(engine.generate_during(prompts(), event, **ASKED))


def check(found: list[Answer], wanted: list[Answer]) -> None:
    """Compare each answer up to the first token that another rounding could change."""
    num_compared = 0
    for ours, theirs in zip(found, wanted, strict=True):
        for step, (mine, row) in enumerate(zip(ours.logprobs, theirs.logprobs, strict=True)):
            np.testing.assert_allclose(mine, row, rtol=0, atol=TOLERANCE)
            num_compared += 1
            second, best = np.sort(row)[-2:]
            if best - second < 2 * TOLERANCE:
                break
            assert ours.tokens[step] == theirs.tokens[step]
    assert num_compared > 3 * len(wanted)


@pytest.fixture
def undisturbed(path: Path) -> list[Answer]:
    """Return the answers of one node of each role."""
    with Engine(plan_of(path)) as engine:
        return ask(engine)


def plan_of(
    path: Path, experts: Sequence[int] = (NUM_EXPERTS,), num_attention: int = 1, **settings: Any
) -> EnginePlan:
    """Return a plan of expert nodes with so many `experts` and 1, 2, ... threads."""
    plan = engine_config(
        path,
        attention_nodes=num_attention,
        expert_nodes=len(experts),
        **only_copies(sum(experts) - NUM_EXPERTS),
        **settings,
    )
    nodes = [
        msgspec.structs.replace(node, experts=experts[node.index], num_threads=1 + node.index)
        if isinstance(node, ExpertNode)
        else node
        for node in plan.nodes
    ]
    planned = msgspec.structs.replace(plan, nodes=tuple(nodes), precision=rules_for(path))
    check_plan(planned)
    check_model(planned, facts_of(load_model_config(path), path))
    return planned


@pytest.mark.slow
@pytest.mark.parametrize("path", ["qwen2_moe", "qwen3_moe"], indirect=True)
def test_one_node_of_each_role(path: Path) -> None:
    """Also in the MLPs of dense layers and shared experts, which only qwen2_moe has."""
    model = oracle_model(path)
    ops = select_ops("cpu", torch.float32, ["int4", "int8"])
    with torch.inference_mode(), patched(model, ops, rules_for(path)):
        wanted = [clear_tokens(model, prompt) for prompt in prompts()]
    assert sum(map(len, wanted)) > 2 * NUM_STEPS
    with Engine(plan_of(path)) as engine:
        found = engine.generate(prompts(), max_tokens=NUM_STEPS)
    assert [tokens[: len(want)] for tokens, want in zip(found, wanted, strict=True)] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "num_attention"), [("shm", 1), ("tcp", 2)])
def test_tables_change_while_streams_go_on(
    path: Path, undisturbed: list[Answer], transport: str, num_attention: int
) -> None:
    """Of eleven slots per layer one node has seven and the other four."""
    plan = plan_of(path, (7, 4), num_attention, transport=transport, prefix_caching=False)
    tables = random_tables((7, 4), seed=2)
    with Engine(plan) as engine:
        for _ in range(MAX_ROUNDS):
            check(answers(engine.generate_on(prompts(), tables, **ASKED)), undisturbed)
            if engine.stats().expert_table_version >= 4:
                break
        stats = engine.stats()
        assert stats.expert_table_version >= 4
        assert stats.expert_migrations > 0


@pytest.mark.slow
def test_a_lost_nodes_copies_take_over_and_it_returns(
    path: Path, undisturbed: list[Answer]
) -> None:
    """One node has all experts, the other second copies of three."""
    restart: dict[str, Any] = {"restart": True, "restart_deadline_s": 60.0}
    plan = plan_of(path, (8, 3), 2, transport="shm", **restart)
    with faulty_node("expert", 1) as injector, Engine(plan) as engine:
        engine.may_restart.clear()  # until the streams have gone on without it
        check(ask(engine, injector.crash), undisturbed)
        assert injector.num_injected == 1
        assert "without expert 1" in engine.details
        check(ask(engine), undisturbed)
        engine.may_restart.set()
        engine.wait_until_whole()
        check(ask(engine), undisturbed)
