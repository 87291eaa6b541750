"""Nodes on a device: greedy fp32 tokens equal transformers', sampled tokens the CPU's.

Without a GPU the device is the CPU: Triton's kernels are interpreted, and all else works as on a
GPU's nodes (Place.is_device) except for calls into the driver. Interpretation is slow, hence few
prompts and tokens. Two threads cannot interpret at once, so of two roles that compute at the same
time in this process one uses Triton and one the CPU's kernels; tests/system/test_devices.py runs
whole processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention_nodes.long_contexts.retrieval import num_places, place_bytes
from kernels.contracts import SEGMENT_KEYS
from models.description.config import load_model_config
from tests.checkpoints import MOE_VARIANTS, make_checkpoint
from tests.engine import Engine, engine_config
from tests.identity.cache.test_retrieval import BUDGET, Oracle, generate
from tests.identity.cache.test_retrieval import config_of as retrieval_config
from tests.identity.cache.test_retrieval import prompts_of as retrieval_prompts
from tests.identity.conftest import NUM_TOKENS, Case, CaseOf
from tests.identity.speculation.test_draft_model import TREES, speculation_of
from tests.identity.speculation.test_draft_nodes import generate_until
from tests.identity.speculation.test_speculation import accepted
from tests.identity.weights.test_expert_tables import config_of, only_copies, random_tables
from tests.pairwise import cover_pairs
from tests.structs import changed, with_nodes
from topspin.plan.retrieval import SpillSpec, policy_of

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
slow = pytest.mark.slow

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
ON_ONE = {"kernels": "triton", "attention_device": DEVICE, "expert_device": DEVICE}
ATTENTION_ON_IT = {**ON_ONE, "expert_kernels": "cpu", "expert_device": "cpu"}
EXPERTS_ON_IT = {"kernels": "cpu", "expert_kernels": "triton", "expert_device": DEVICE}

# Sizes of steps are recorded when the engine starts: few of them, so the third prompt waits.
MAX_NUM_SEQS = 2
# Prompts end after different numbers of tokens, so that a step's size changes.
LENGTHS = (3, 2, 2)
# The chosen prompts have about this length; at least one is longer than the sliding window.
PROMPT_LEN = 8
SAMPLING = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 5, "presence_penalty": 0.5}


def prompts_of(case: Case) -> list[int]:
    """Return the indices of the prompts of `case` to run."""
    lengths = [len(prompt) for prompt in case.prompts]
    return sorted(range(len(lengths)), key=lambda idx: abs(lengths[idx] - PROMPT_LEN))[:3]


def check(case: Case, *, is_sampled: bool = False, **settings: Any) -> None:
    config = engine_config(case.path, max_num_seqs=MAX_NUM_SEQS, **{**ON_ONE, **settings})
    with Engine(config) as engine:
        chosen = prompts_of(case)
        ids = [
            engine.add(case.prompts[idx], max_tokens=length)
            for idx, length in zip(chosen, LENGTHS, strict=True)
        ]
        engine.collect()
        got = [engine.requests[each].tokens for each in ids]
        want = [case.tokens[idx][:length] for idx, length in zip(chosen, LENGTHS, strict=True)]
        assert got == want
        if is_sampled:
            prompts = [case.prompts[idx] for idx in chosen[:2]]
            sampled = engine.generate(prompts, max_tokens=2, **SAMPLING)
            with Engine(engine_config(case.path)) as on_cpu:
                assert on_cpu.generate(prompts, max_tokens=2, **SAMPLING) == sampled
            assert sampled != [case.tokens[idx][:2] for idx in chosen[:2]]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"micro_batches": 2}, marks=slow),
        pytest.param({"recordings": False, "expert_nodes": 2, "is_sampled": True}, marks=slow),
    ],
)
def test_attention_and_experts_on_one_device(case_of: CaseOf, settings: dict[str, Any]) -> None:
    check(case_of("gpt_oss"), **settings)  # two groups of layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "micro_batches", "recordings", "expert_nodes"),
    cover_pairs(MOE_VARIANTS, (1, 2, 3), (True, False), (1, 3)),
)
def test_families_on_one_device(
    case_of: CaseOf, variant: str, micro_batches: int, recordings: bool, expert_nodes: int
) -> None:
    check(
        case_of(variant),
        micro_batches=micro_batches,
        recordings=recordings,
        expert_nodes=expert_nodes,
    )


@pytest.mark.parametrize("variant", ["llama", "llama_bias"])
@pytest.mark.slow
def test_dense_models_on_a_device(case_of: CaseOf, variant: str) -> None:
    check(case_of(variant), micro_batches=2, is_sampled=True)


@pytest.mark.slow
def test_decoding_with_retrieval_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers with the same selection; beside it a sequence that is too short.

    Of two full segments and the open one, one full one is searched.
    """
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    path = make_checkpoint(tmp_path, "llama", max_position_embeddings=4096, **heads)
    policy = policy_of(BUDGET)
    assert policy is not None
    oracle = Oracle(msgspec.structs.replace(policy, num_searched=SEGMENT_KEYS))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "retrieving", oracle.attend)
    prompts = retrieval_prompts((2 * SEGMENT_KEYS + 150, 30))
    expected = [each[:4] for each in generate(path, prompts, "retrieving")]
    assert expected != [each[:4] for each in generate(path, prompts, "eager")]
    config = retrieval_config(path, kv_retrieval_tokens=BUDGET, max_num_seqs=MAX_NUM_SEQS, **ON_ONE)
    with Engine(changed(config, {"kv_cache.retrieval": oracle.policy})) as engine:
        assert engine.generate(prompts, max_tokens=4) == expected
        stats = engine.stats()
    assert (stats.kv.num_selected_rows, stats.kv.num_coded_segments) == (3, 2)
    # The watched step is the first; its layer is the only one.
    assert stats.kv.recall_sum == pytest.approx(oracle.recalls[0], abs=1e-6)


@slow
@pytest.mark.timeout(300)
def test_keys_in_the_hosts_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers; the first request decodes while the second takes its memory.

    The third comes later and begins as the first did, whose blocks then come back.
    """
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    path = make_checkpoint(tmp_path, "llama", max_position_embeddings=4096, **heads)
    policy = policy_of(BUDGET)
    assert policy is not None
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "retrieving", Oracle(policy).attend)
    first, second = retrieval_prompts((2 * SEGMENT_KEYS + 150, 2 * SEGMENT_KEYS + 170))
    prompts = [first, second, [*first[:1500], 7]]
    expected = generate(path, prompts, "retrieving")
    token_bytes = 2 * 4 * 32
    config = retrieval_config(
        path,
        kv_retrieval_tokens=BUDGET,
        kv_spill=SpillSpec(directory="host", size_bytes=8192 * token_bytes),
        max_num_seqs=MAX_NUM_SEQS,
        **ON_ONE,
    )
    places = num_places(512, block_size=16, max_num_seqs=MAX_NUM_SEQS)
    codes = places * place_bytes(load_model_config(path), config.kv_cache)
    memory = 241 * 16 * token_bytes + codes
    with Engine(with_nodes(config, "attention", kv_cache_bytes=memory)) as engine:
        assert engine.generate(prompts[:2], max_tokens=12) == expected[:2]
        assert engine.generate(prompts[2:], max_tokens=12) == expected[2:]
        stats = engine.stats()
    assert stats.kv.num_saved_blocks > 30
    assert stats.kv.num_loaded_blocks > 10


@slow
@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_attention_on_a_device_and_experts_on_the_cpu(case_of: CaseOf, transport: Any) -> None:
    check(
        case_of("qwen2_moe"),
        transport=transport,
        expert_nodes=2,
        micro_batches=2,
        is_sampled=transport == "local",
        **ATTENTION_ON_IT,
    )


@slow
@pytest.mark.parametrize("transport", ["local", "shm"])
def test_attention_on_the_cpu_and_experts_on_a_device(case_of: CaseOf, transport: Any) -> None:
    case = case_of("qwen2_moe")
    chosen = prompts_of(case)
    config = engine_config(
        case.path,
        transport=transport,
        attention_nodes=1 if transport == "local" else 2,
        micro_batches=2,
        **EXPERTS_ON_IT,
    )
    with Engine(config) as engine:
        got = engine.generate([case.prompts[idx] for idx in chosen], max_tokens=4)
        assert got == [case.tokens[idx][:4] for idx in chosen]


@slow
def test_experts_move_on_a_device_while_requests_run(case_of: CaseOf) -> None:
    """A recording for one table is not replayed for the next."""
    case = case_of("mixtral")
    chosen = prompts_of(case)[:MAX_NUM_SEQS]
    config = config_of(
        case.path,
        (1, 2),
        **only_copies(2),
        max_num_seqs=MAX_NUM_SEQS,
        **ON_ONE,
    )
    tables = random_tables((5, 5), seed=3)
    with Engine(config) as engine:
        prompts = [case.prompts[idx] for idx in chosen]
        requests = engine.generate_on(prompts, tables, max_tokens=NUM_TOKENS)
        assert [request.tokens for request in requests] == [case.tokens[idx] for idx in chosen]
        assert engine.stats().expert_table_version >= 3


@slow
def test_a_draft_model_beside_attention_on_a_device(case_of: CaseOf) -> None:
    case = case_of("qwen3_moe")
    config = engine_config(
        case.path,
        transport="shm",
        max_num_seqs=MAX_NUM_SEQS,
        speculation=speculation_of(case.path, **TREES),
        **ATTENTION_ON_IT,
    )
    with Engine(config) as engine:
        idx = prompts_of(case)[0]
        assert engine.generate([case.prompts[idx]], max_tokens=6) == [case.tokens[idx][:6]]
        assert accepted(engine.stats()) >= 3


@slow
def test_a_draft_node_on_a_device(case_of: CaseOf) -> None:
    """Interpreted, it takes most of this process's time: few prompts of a dense model."""
    case = case_of("llama")
    case = case._replace(prompts=case.prompts[:2], tokens=case.tokens[:2])
    config = engine_config(case.path, speculation=speculation_of(case.path, **TREES), draft_nodes=1)
    nodes = [
        replace(node, device=DEVICE, kernels="triton") if node.role == "draft" else node
        for node in config.nodes
    ]
    with Engine(replace(config, nodes=tuple(nodes))) as engine:
        generate_until(engine, case, lambda stats: stats.num_draft_passes > 0)
