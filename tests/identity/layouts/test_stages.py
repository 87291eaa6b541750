"""Layers cut over several processes: the tokens of transformers, and of an uncut engine."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kernels.cpu.compiled.matmul.linear import block_width
from kernels.cpu.compiled.program import Program
from tests.checkpoints import make_checkpoint
from tests.engine import TIMEOUT_S, Collected, Engine, engine_config
from tests.faults import faulty_node
from tests.identity.conftest import NUM_TOKENS, CaseOf
from tests.identity.speculation.test_grammars import asked
from tests.identity.test_deterministic import ask, run, settings_of
from tests.identity.test_recordings import PROMPTS, SIZES
from tests.identity.weights.test_expert_tables import only_copies, random_tables
from topspin.plan.rules.checks import check_plan
from topspin.plan.settings import BalancePolicy
from topspin.plan.spec import AttentionNode, EnginePlan, StageNode

slow = pytest.mark.slow


def staged(plan: EnginePlan, *ends: int, cache_bytes: Sequence[int] = ()) -> EnginePlan:
    """Return `plan` with the layers of each attention node cut at `ends`.

    Stages have caches of `cache_bytes`; (): as their attention node.
    """
    attention: list[AttentionNode] = []
    stages: list[StageNode] = []
    ranges = list(pairwise((0, *ends)))
    for node in plan.attention:
        attention.append(msgspec.structs.replace(node, layers=ranges[0]))
        for idx, layers in enumerate(ranges[1:]):
            size_bytes = cache_bytes[idx] if cache_bytes else node.kv_cache_bytes
            assert size_bytes is not None
            stages.append(
                StageNode(
                    index=len(stages),
                    device=node.device,
                    kernels=node.kernels,
                    wait=node.wait,
                    num_threads=node.num_threads,
                    of=node.index,
                    layers=layers,
                    kv_cache_bytes=size_bytes,
                )
            )
    plan = msgspec.structs.replace(plan, nodes=(*attention, *stages, *plan.experts))
    check_plan(plan)
    return plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "ends", "settings"),
    [
        ("gpt_oss", (1, 3), {"transport": "shm", "micro_batches": 1}),
        # A dense layer, a shared expert; three unequal stages of two nodes each.
        (
            "qwen2_moe",
            (1, 3, 4),
            {"transport": "tcp", "micro_batches": 3, "attention_nodes": 2, "expert_nodes": 2},
        ),
        (
            "qwen2_moe_sparse_step",
            (3, 4),
            {"transport": "shm", "micro_batches": 2, "expert_nodes": 3},
        ),
        (
            "qwen3_moe_unnormalised",
            (1, 2, 3),
            {"transport": "shm", "micro_batches": None, "latency_us": 50.0},
        ),
    ],
)
def test_every_cut_gives_the_tokens_of_transformers(
    case_of: CaseOf, variant: str, ends: tuple[int, ...], settings: dict[str, Any]
) -> None:
    case = case_of(variant)
    plan = staged(engine_config(case.path, **settings), *ends)
    with Engine(plan) as engine:
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "settings", "dtype"),
    [
        ((1, 4), {"transport": "shm", "micro_batches": 2, "attention_nodes": 2}, "bfloat16"),
        (
            (1, 2, 4),
            {"transport": "shm", "micro_batches": 3, "attention_nodes": 2, "expert_nodes": 2},
            "float32",
        ),
    ],
)
def test_the_bits_are_those_of_an_engine_without_stages(
    case_of: CaseOf, ends: tuple[int, ...], settings: dict[str, Any], dtype: str
) -> None:
    """In chunks, with cached prefixes, and preempted by the smallest cache."""
    case = case_of("qwen2_moe")
    wanted = run(case, dtype=dtype)
    settings = settings | {"dtype": dtype, "max_num_batched_tokens": 19}
    plan = settings_of(case, **settings)
    # 26 blocks of 4 tokens of 32 numbers, keys and values, and ever more: the longest has 22.
    token_bytes = 2 * 32 * getattr(torch, dtype).itemsize
    sizes = [
        (26 + 7 * idx) * 4 * token_bytes * (high - low)
        for idx, (low, high) in enumerate(pairwise(ends[:]))
    ]
    with Engine(staged(plan, *ends, cache_bytes=sizes)) as engine:
        assert ask(engine, case.prompts) == wanted
        # The others may have evicted its blocks, and the first two may go to two nodes.
        for _ in range(3):
            assert ask(engine, case.prompts[:1]) == wanted[:1]
        assert engine.stats().prefix_cache_hits > 0
        # Which requests meet in a node, and so whether one is preempted, depends on the machine.
        deadline_s = time.monotonic() + TIMEOUT_S
        while not engine.stats().num_preemptions:
            assert ask(engine, case.prompts) == wanted
            assert time.monotonic() < deadline_s


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return, by node, how often a program has run."""
    if not block_width():
        pytest.skip("this processor leaves bf16 products to oneDNN")
    counts: Counter[str] = Counter()
    run = Program.run

    def counted(program: Program) -> None:
        counts[threading.current_thread().name] += 1
        run(program)

    monkeypatch.setattr(Program, "run", counted)
    return counts


def send(engine: Engine) -> list[Collected]:
    """Ask for seeded, biased and grammar-constrained continuations with log-probabilities."""
    prompts = [*PROMPTS, [1, 2]]
    ids = [
        engine.add(prompt, **{**each, "logprobs": 4})
        for prompt, each in zip(prompts, asked(), strict=True)
    ]
    return [engine.requests[each] for each in ids]


@pytest.mark.parametrize(
    ("variant", "ends", "settings"),
    [
        # A dense layer and shared experts.
        ("qwen2_moe", (1, 3, 4), {"transport": "shm", "micro_batches": 2, "num_threads": 2}),
        pytest.param("llama", (1, 2), {"transport": "shm", "micro_batches": 1}, marks=slow),
    ],
)
@pytest.mark.slow
def test_recorded_steps_have_the_bits_of_an_engine_without_stages(
    tmp_path: Path,
    variant: str,
    ends: tuple[int, ...],
    settings: dict[str, Any],
    replays: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "recordings")
    sizes = {name: size for name, size in SIZES.items() if variant != "llama" or "moe" not in name}
    path = make_checkpoint(tmp_path, variant, **sizes)
    answers = []
    for plan in (
        # The same link: in bf16 a shared expert's sum with an answer depends on how that came.
        engine_config(path, dtype="bfloat16", recordings=False, **settings),
        staged(engine_config(path, dtype="bfloat16", window_rows=64, **settings), *ends),
    ):
        with Engine(plan) as engine:
            for _ in range(2):
                requests = send(engine)
                engine.collect()
                assert [each.failed for each in requests] == [None] * len(requests)
                answers.append([(each.tokens, each.logprobs) for each in requests])
        if not plan.stages:
            assert not replays
    assert answers[2:] == answers[:2]
    for node in (*plan.attention, *plan.stages, *(plan.experts if variant != "llama" else ())):
        assert replays[str(node)] > 50, node
    assert "not recorded" not in caplog.text


@pytest.mark.slow
def test_steps_are_recorded_anew_when_tables_change_under_load(
    tmp_path: Path, replays: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """On one expert node, so that its sums do not depend on the table."""
    caplog.set_level("INFO", "recordings")
    path = make_checkpoint(tmp_path, "mixtral", hidden_size=64, intermediate_size=64)
    with Engine(engine_config(path, dtype="bfloat16", recordings=False)) as engine:
        wanted = engine.generate(PROMPTS, max_tokens=48, temperature=1.0)
    plan = engine_config(path, dtype="bfloat16", transport="shm", window_rows=64, **only_copies(0))
    tables = random_tables((8,), seed=3)
    with Engine(staged(plan, 1, 2)) as engine:
        balancer = engine.service.balancer
        for _ in range(3):
            ids = [engine.add(each, max_tokens=48, temperature=1.0) for each in PROMPTS]
            requests = [engine.requests[each] for each in ids]

            def change_on(requests: list[Collected] = requests) -> bool:
                num_tokens = min(len(each.tokens) for each in requests)
                if num_tokens % 12 == 5 and not balancer.is_changing:
                    balancer.ask(next(tables))
                return all(each.ended for each in requests)

            engine.collect(until=change_on)
            assert [each.tokens for each in requests] == wanted
        assert engine.stats().expert_table_version > 4
    assert replays["attention 0"] > 50
    assert replays["stage 0"] > 50
    assert "not recorded" not in caplog.text


def test_the_smallest_cache_counts(case_of: CaseOf) -> None:
    case = case_of("mixtral")
    whole = engine_config(case.path, transport="shm", kv_cache_bytes=2**20)
    with Engine(whole) as engine:
        num_blocks = engine.stats().num_blocks
    # Half of the layers each, with as many bytes and a quarter of them.
    with Engine(staged(whole, 1, 2, cache_bytes=[2**18])) as engine:
        assert engine.stats().num_blocks == num_blocks // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "sender", "num_attention"),
    [
        ("stage", 1, 1),
        ("stage", 3, 2),
        ("attention", 1, 2),
        ("attention", 0, 1),
        ("expert", 1, 2),
    ],
)
def test_streams_go_on_after_the_loss_of_any_node(
    case_of: CaseOf, role: str, sender: int, num_attention: int
) -> None:
    case = case_of("mixtral")
    plan = engine_config(
        case.path,
        transport="shm",
        attention_nodes=num_attention,
        expert_nodes=2,
        micro_batches=2,
        balance=BalancePolicy(interval_s=0.0),
        restart=True,
        restart_deadline_s=60.0,
    )

    with faulty_node(role, sender) as injector, Engine(staged(plan, 1, 2)) as engine:
        requests = engine.generate_during(case.prompts, injector.crash, max_tokens=NUM_TOKENS)
        assert [each.tokens for each in requests] == case.tokens
        assert engine.stats().num_replays > 0
        engine.wait_until_whole()
        assert engine.generate(case.prompts, max_tokens=NUM_TOKENS) == case.tokens
    assert injector.num_injected == 1
