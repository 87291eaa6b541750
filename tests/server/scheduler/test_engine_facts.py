"""The facts read from a model without torch, and whether roles share cores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.scheduler.engine_facts import EngineFacts, read_facts, shares_cores
from tests.server.scheduler.engine import make_config
from tests.structs import with_nodes
from topspin.plan.spec import PlannedModel

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def planned(path: Path, config: dict[str, Any], **fields: Any) -> PlannedModel:
    """Return the model whose config.json, which is written, is `config`."""
    (path / "config.json").write_text(json.dumps(config))
    return PlannedModel(path=str(path), dtype="float32", max_model_len=64, **fields)


def test_facts_of_a_moe_model(tmp_path: Path) -> None:
    assert read_facts(planned(tmp_path, MIXTRAL), 2) == EngineFacts(3, 8, 300, 64, 2, (0, 1, 2))


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    assert read_facts(planned(tmp_path, LLAMA), 2) == EngineFacts(0, 0, 300, 64, 2)


@pytest.mark.parametrize(
    ("addresses", "num_threads", "shared"),
    [
        (["unix:@a", "unix:@b"], None, True),
        (["local"], None, True),
        (["local"], 1, True),  # 3 threads on 6 cores, but they take turns
        (["tcp:127.0.0.1:4000"], 4, True),
        (["unix:@a"], 2, False),  # 2 attention and 1 expert node, 2 threads each, 6 cores
        (["nixl:unix:@a", "nixl:tcp:127.0.0.1:4000"], None, True),
        (["unix:@a", "tcp:10.0.0.7:4000"], None, False),
        (["nixl:tcp:10.0.0.7:4000"], None, False),
    ],
)
def test_shared_cores(addresses: list[str], num_threads: int | None, shared: bool) -> None:
    plan = with_nodes(make_config(num_nodes=2), num_threads=num_threads)
    assert shares_cores(plan, addresses, 6) == shared


def test_nodes_with_cores_of_their_own_share_none() -> None:
    plan = with_nodes(make_config(), cores=(0,))
    assert not shares_cores(plan, ["unix:@x"], 2)


@pytest.mark.parametrize(
    ("attention", "experts", "transport", "shared"),
    [
        ("cuda:0", "cpu", "shm", False),
        ("cuda:0", "cpu", "local", False),
        ("cpu", "cuda:1", "tcp", False),
        ("cuda:0", "cuda:0", "local", True),
        ("cuda:0", "cuda:0", "shm", True),
        ("cuda:0", "cuda:1", "cuda_ipc", False),
    ],
)
def test_a_gpu_is_shared_with_itself_alone(
    attention: str, experts: str, transport: Any, shared: bool
) -> None:
    plan = make_config(transport=transport)
    nodes = [
        msgspec.structs.replace(node, device=device)
        for node, device in zip(plan.nodes, (attention, experts), strict=True)
    ]
    address = "local" if transport == "local" else "unix:@a"
    plan = msgspec.structs.replace(plan, nodes=tuple(nodes))
    assert shares_cores(plan, [address], 6) == shared
