"""The monolithic node process: the parts that tests of a whole engine do not cover."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.launch import local_node
from app.launch.local_node import LocalNode
from kernels.runtime import DeviceMemory, HostRuntime
from m2n_comm.gpu.local import DeviceNet
from m2n_comm.host.local import Serve
from tests.checkpoints import make_checkpoint
from tests.engine import Engine, engine_config
from tests.structs import with_nodes


def test_the_thread_that_loads_experts_ends_and_the_other_one_takes_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader's OpenMP helpers would otherwise count forever, and no helpers would spin.

    The thread that prepares tables begins on the first GPU, whichever one the experts use.
    """
    loaders: list[threading.Thread] = []
    opened: list[tuple[str, threading.Thread]] = []
    experts = SimpleNamespace(runtime=SimpleNamespace(device=torch.device("cuda", 1)))

    def load_experts(path: Path, welcome: Any, index: int) -> Any:
        loaders.append(threading.current_thread())
        return experts

    def open_runtime(device: str) -> None:
        opened.append((device, threading.current_thread()))

    monkeypatch.setattr(local_node, "load_experts", load_experts)
    monkeypatch.setattr(local_node, "open_runtime", open_runtime)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    config = engine_config(make_checkpoint(tmp_path, "mixtral", num_hidden_layers=1)).for_node()
    welcome: Any = SimpleNamespace(config=config)
    node = LocalNode(address="unused", model_path=Path(), attention_nodes=1, expert_nodes=1)
    assert node._load_experts(welcome, 3) is experts
    [loader] = loaders
    assert loader is not threading.current_thread()
    assert not loader.is_alive()
    assert opened == [("cuda:1", threading.current_thread())]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only without a GPU")
def test_the_cache_gets_what_experts_on_the_same_device_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole start of a GPU's process, on a CPU that reports this much memory."""
    opened: list[int] = []

    def open_net(*args: Any, serves: Sequence[Serve], **others: Any) -> DeviceNet:
        opened.append(len(serves))
        return DeviceNet(*args, serves=serves, **others)

    memory = DeviceMemory(total=2 * 2**20, free=2**20, cached=0)
    monkeypatch.setattr(local_node, "DeviceNet", open_net)
    monkeypatch.setattr(HostRuntime, "memory", lambda self: memory)
    path = make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=1)
    made = engine_config(
        path,
        kernels="triton",
        expert_nodes=2,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        recordings=False,
    )
    with Engine(
        with_nodes(made, "attention", kv_cache_bytes=None, gpu_memory_utilization=0.75)
    ) as engine:
        [tokens] = engine.generate([[3, 1, 4]], max_tokens=2)
        assert len(tokens) == 2
        # Three quarters of 2 MiB minus the half that is taken, at 2 KiB a block.
        assert engine.stats().num_blocks == 256
    assert opened == [2, 2]  # for the dry run with all experts, and for serving
