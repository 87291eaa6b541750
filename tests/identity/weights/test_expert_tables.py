"""Experts move while requests run, and no token changes: copies, live tables, balance.

The engine is whole; see tests/engine.py. Tests ask for tables by the scheduler's own hook, at
points counted in output tokens, so that they fall into prefill and decode.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from models.description.config import load_model_config
from server.scheduler.experts.balance import balance
from tests.checkpoints import oracle_generate
from tests.engine import TIMEOUT_S, Engine, engine_config
from tests.identity.conftest import MIN_MARGIN, NUM_TOKENS, Case, CaseOf
from topspin.expert_table import ExpertTable, contiguous_table, even_shares, uniform_table
from topspin.messages import Stats
from topspin.plan.settings import BalancePolicy
from topspin.plan.spec import EnginePlan

slow = pytest.mark.slow
NUM_EXPERTS = 8
MAX_ROUNDS = 50
NUM_LAYERS = 2


def config_of(path: Path, topology: tuple[int, int], **settings: Any) -> EnginePlan:
    return engine_config(path, attention_nodes=topology[0], expert_nodes=topology[1], **settings)


def only_copies(redundant: int) -> dict[str, Any]:
    """Return settings with second copies, of a table that stays as it is."""
    return {"redundant_experts": redundant, "balance": BalancePolicy(interval_s=0.0)}


def random_tables(capacities: Sequence[int], *, seed: int) -> Iterator[ExpertTable]:
    """Yield tables of nodes with so many slots per layer, with experts in random places."""
    rng = random.Random(seed)
    first = contiguous_table(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, capacities=capacities)
    while True:
        layers = []
        for layer in first.slots:
            names = rng.sample(range(NUM_EXPERTS), NUM_EXPERTS)
            nodes = [[names[expert] for expert in experts] for experts in layer]
            for experts in nodes:
                rng.shuffle(experts)
            layers.append(tuple(map(tuple, nodes)))
        yield ExpertTable(version=1, num_experts=NUM_EXPERTS, slots=tuple(layers))


CHANGES = (
    ("mixtral", "local", (2, 2), 2, 1),
    ("mixtral", "shm", (1, 3), 4, 2),
    ("mixtral", "shm", (2, 2), 0, 1),
    ("mixtral", "tcp", (2, 2), 3, 1),
    ("olmoe", "shm", (1, 2), 2, 1),  # experts joined in one matrix, in bfloat16
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "transport", "topology", "redundant", "micro_batches", "dtype"),
    [(*row, dtype) for row in CHANGES for dtype in ("float32", "bfloat16")],
)
def test_tables_change_while_streams_go_on(
    case_of: CaseOf,
    variant: str,
    transport: str,
    topology: tuple[int, int],
    redundant: int,
    micro_batches: int,
    dtype: str,
) -> None:
    """Prompts go in chunks of 16 tokens; once a table is in use the next one is requested."""
    case = case_of(variant)
    settings: dict[str, Any] = {
        "transport": transport,
        "micro_batches": micro_batches,
        "max_num_batched_tokens": 16,
        "dtype": dtype,
    }
    config = config_of(case.path, topology, **only_copies(redundant), **settings)
    tables = random_tables(even_shares(NUM_EXPERTS + redundant, topology[1]), seed=len(transport))
    with Engine(config) as engine:
        # How many tables come into use within a round depends on the machine.
        for _ in range(MAX_ROUNDS):
            requests = engine.generate_on(case.prompts, tables, max_tokens=NUM_TOKENS)
            tokens = [each.tokens for each in requests]
            if dtype == "float32":
                assert tokens == case.tokens
            else:
                assert [len(each) for each in tokens] == [NUM_TOKENS] * len(tokens)
            stats = engine.stats()
            if stats.expert_table_version >= 3:
                break
    assert stats.expert_table_version >= 3
    assert stats.expert_migrations > 0


@pytest.fixture(scope="module")
def skewed(case_of: CaseOf, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a model that takes expert 2 or 3 for every token, with the oracle's answers."""
    case = case_of("mixtral")
    path = tmp_path_factory.mktemp("skewed")
    shutil.copytree(case.path, path, dirs_exist_ok=True)
    weights = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("block_sparse_moe.gate.weight"):
            # Opposite logits far from 0: each token takes one of the first two.
            tensor[2] *= 8.0
            tensor[3] = -tensor[2]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    result = oracle_generate(path, case.prompts, NUM_TOKENS)
    clear = [idx for idx, margin in enumerate(result.margins) if margin >= MIN_MARGIN]
    assert len(clear) >= 4, result.margins
    return Case(path, [case.prompts[i] for i in clear], [result.tokens[i] for i in clear])


def counted(engine: Engine, num_pairs: int) -> Stats:
    """Return the stats once the expert nodes have reported `num_pairs` pairs per layer."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        stats = engine.stats()
        totals = [sum(layer) for layer in stats.expert_tokens]
        if totals == [num_pairs] * NUM_LAYERS:
            return stats
        assert max(totals) <= num_pairs
    raise AssertionError(f"{totals} pairs reported instead of {num_pairs} per layer")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local", "shm"])
def test_every_routed_pair_is_reported_once(case_of: CaseOf, transport: str) -> None:
    """The nodes' own clock sends all reports, without a request to wake them."""
    case = case_of("mixtral")
    model = load_model_config(case.path)
    assert model.moe is not None
    config = config_of(
        case.path, (2, 2), **only_copies(0), transport=transport, prefix_caching=False
    )
    # The last token of a request is sampled but never computed.
    num_tokens = sum(len(prompt) + NUM_TOKENS - 1 for prompt in case.prompts)
    with Engine(config) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
        stats = counted(engine, model.moe.top_k * num_tokens)
        assert all(len(layer) == model.moe.num_experts for layer in stats.expert_tokens)
    num_pairs = sum(map(sum, stats.expert_tokens))
    assert 0 < stats.expert_batches < stats.expert_activations < num_pairs
    assert stats.expert_activations <= stats.expert_batches * model.moe.num_experts // 2


@pytest.mark.parametrize(
    ("transport", "redundant"),
    [pytest.param("local", 0, marks=slow), ("shm", 2), pytest.param("tcp", 2, marks=slow)],
)
def test_a_skewed_model_is_balanced_live(
    skewed: Case, transport: str, redundant: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expert_nodes.worker.COUNTS_INTERVAL_S", 0.02)
    # Both nodes are as fast, whatever else this machine computes meanwhile.
    monkeypatch.setattr("server.scheduler.experts.speeds.EQUAL", math.inf)
    config = config_of(
        skewed.path,
        (1, 2),
        redundant_experts=redundant,
        balance=BalancePolicy(interval_s=0.0, half_life_pairs=4096),
        transport=transport,
        prefix_caching=False,
        max_num_batched_tokens=64,
    )
    num_tokens = sum(len(prompt) + NUM_TOKENS - 1 for prompt in skewed.prompts)
    with Engine(config) as engine:
        service = engine.service
        assert engine.generate(skewed.prompts, max_tokens=NUM_TOKENS) == skewed.tokens
        before = counted(engine, 2 * num_tokens)
        assert (before.expert_table_version, before.expert_migrations) == (1, 0)
        assert before.expert_balance > 1.1
        # Streams run while the table changes, which is planned by the counts of before: of those
        # that come meanwhile one node's may be there and the other's not.
        service.balancer.ask()
        ids = [engine.add(prompt, max_tokens=NUM_TOKENS) for prompt in skewed.prompts]
        engine.collect()
        assert [engine.requests[each].tokens for each in ids] == skewed.tokens
        during = counted(engine, 4 * num_tokens)
        assert during.expert_table_version == 2
        assert 0 < during.expert_migrations <= NUM_LAYERS * (NUM_EXPERTS + redundant)
        assert during.expert_balance_before > 1
        assert engine.generate(skewed.prompts, max_tokens=NUM_TOKENS) == skewed.tokens
        after = counted(engine, 6 * num_tokens)
        loads = [list(map(float, layer)) for layer in after.expert_tokens]
        now = service.formation.table
    assert after.expert_balance < 1 + (before.expert_balance - 1) / 2
    first = uniform_table(
        num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_nodes=2, num_redundant=redundant
    )
    assert balance(now, loads) < 1 + (balance(first, loads) - 1) / 2


@pytest.mark.slow
def test_the_clock_asks_for_balance_by_itself(skewed: Case) -> None:
    """When the interval has always passed, the table changes once there are enough counts."""
    config = config_of(
        skewed.path,
        (1, 2),
        balance=BalancePolicy(interval_s=1e-6, half_life_pairs=2),
        transport="shm",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("expert_nodes.worker.COUNTS_INTERVAL_S", 0.0)
        with Engine(config) as engine:
            assert engine.generate(skewed.prompts, max_tokens=NUM_TOKENS) == skewed.tokens
            assert engine.stats().expert_table_version >= 2
