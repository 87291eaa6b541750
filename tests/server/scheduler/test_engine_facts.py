"""The facts read from a model without torch, and whether roles share cores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.scheduler.engine_facts import EngineFacts, read_facts, shares_cores
from tests.server.scheduler.engine import make_config
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
    assert read_facts(planned(tmp_path, MIXTRAL), 2) == EngineFacts(
        *(3, 8, 300, 64, 2, (0, 1, 2)), windows=(None,) * 3
    )


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    assert read_facts(planned(tmp_path, LLAMA), 2) == EngineFacts(
        *(0, 0, 300, 64, 2), windows=(None,) * 3
    )


CPU, GPU, OTHER = "cpu", "cuda:0", "cuda:1"


@pytest.mark.parametrize(
    ("devices", "addresses", "nodes", "shared"),
    [
        ((CPU, CPU, CPU), ["unix:@a", "unix:@b"], {}, True),
        ((CPU, CPU, CPU), ["local"], {}, True),
        ((CPU, CPU, CPU), ["local"], {"num_threads": 1}, True),  # 3 on 6 cores, but in turns
        ((CPU, CPU, CPU), ["tcp:127.0.0.1:4000"], {"num_threads": 4}, True),
        ((CPU, CPU, CPU), ["unix:@a"], {"num_threads": 2}, False),  # 6 threads on 6 cores
        ((CPU, CPU, CPU), ["nixl:unix:@a", "nixl:tcp:127.0.0.1:4000"], {}, True),
        ((CPU, CPU, CPU), ["unix:@a", "tcp:10.0.0.7:4000"], {}, False),
        ((CPU, CPU, CPU), ["nixl:tcp:10.0.0.7:4000"], {}, False),
        ((CPU, CPU), ["unix:@a"], {"cores": (0,)}, False),  # cores of their own
        # A GPU is shared with itself alone.
        ((GPU, CPU), ["unix:@a"], {}, False),
        ((GPU, CPU), ["local"], {}, False),
        ((CPU, OTHER), ["unix:@a"], {}, False),
        ((GPU, GPU), ["local"], {}, True),
        ((GPU, GPU), ["unix:@a"], {}, True),
        ((GPU, OTHER), ["unix:@a"], {}, False),
    ],
)
def test_shared_cores(
    devices: tuple[str, ...], addresses: list[str], nodes: dict[str, Any], shared: bool
) -> None:
    """The last device is the expert node's; the host has 6 cores."""
    plan = make_config(
        num_nodes=len(devices) - 1, transport="local" if addresses == ["local"] else "shm"
    )
    placed = [
        msgspec.structs.replace(node, device=device, **nodes)
        for node, device in zip(plan.nodes, devices, strict=True)
    ]
    plan = msgspec.structs.replace(plan, nodes=tuple(placed))
    assert shares_cores(plan, addresses, 6) == shared
