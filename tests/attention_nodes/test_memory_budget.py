"""The KV cache of a GPU: the arithmetic, the dry run, and a node's use of both."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_nodes.loading import load_runner
from attention_nodes.memory_budget import (
    GRAPH_BYTES,
    MemoryUse,
    blocks_that_fit,
    largest_steps,
    measure,
)
from attention_nodes.step.kv_cache import bytes_per_block, layer_specs
from attention_nodes.step.model_runner import ModelRunner
from kernels import reference
from kernels.runtime import DeviceMemory, HostRuntime
from m2n_comm.gpu.ipc_pairs import inbox_bytes
from models.description.config import load_model_config
from tests.attention_nodes.plans import SilentNet
from tests.checkpoints import make_checkpoint
from tests.engine import engine_config
from tests.structs import changed
from topspin.errors import ConfigError
from topspin.messages import SAMPLE, SCORE, StepPlan, StepTicket, unpack_ints
from topspin.plan.retrieval import RetrievalPolicy
from topspin.plan.spec import NodeConfig

GIB = 2**30


def fit(use: MemoryUse, *, utilization: float = 0.9, block_bytes: int = 2 * 2**20) -> int:
    return blocks_that_fit(
        use, utilization=utilization, block_bytes=block_bytes, blocks_per_sequence=512
    )


def test_blocks_fill_what_is_left() -> None:
    use = MemoryUse(
        total=100 * GIB, others=2 * GIB, weights=60 * GIB, activations=3 * GIB, graphs=5 * GIB
    )
    assert fit(use) == 20 * 512
    assert fit(use, utilization=1.0) == 30 * 512
    assert fit(use, block_bytes=3 * GIB) == 6


def test_too_little_memory_is_refused_with_all_the_numbers() -> None:
    use = MemoryUse(
        total=80 * GIB, others=GIB, weights=66 * GIB, activations=3 * GIB, graphs=2 * GIB
    )
    with pytest.raises(ConfigError) as caught:
        fit(use)
    for part in (
        "--gpu-memory-utilization 0.9: of 80.0 GiB",
        "others take 1.0 GiB",
        "weights 66.0 GiB",
        "largest step 3.0 GiB",
        "recorded steps 2.0 GiB",
        "72.0 GiB may be used",
        "leaves 0 blocks",
        "2.0 MiB each",
        "512 for one sequence of --max-model-len",
    ):
        assert part in str(caught.value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("budget"), "mixtral")


@pytest.fixture
def config(checkpoint: Path) -> NodeConfig:
    plan = engine_config(checkpoint, max_num_batched_tokens=48)
    fields = {
        "model.max_model_len": 20,
        "node.kv_cache_bytes": None,
        "node.kernels": "triton",
        "node.max_num_seqs": 7,
    }
    return changed(plan.for_node(), fields)


def test_the_largest_steps_fill_every_limit(config: NodeConfig) -> None:
    prompts, singles, short = largest_steps(config, index=3, table_version=5)
    assert prompts.ticket.participants == singles.ticket.participants == (3,)
    assert prompts.ticket.table_version == 5
    assert list(unpack_ints(prompts.micro_batches[0].num_tokens)) == [20, 20, 8]
    assert list(unpack_ints(singles.micro_batches[0].num_tokens)) == [1] * 7
    assert list(unpack_ints(short.micro_batches[0].num_tokens)) == [20]
    for plan in (prompts, singles, short):
        assert set(plan.micro_batches[0].wanted) == {SAMPLE | SCORE}
        for new in plan.new:
            assert set(unpack_ints(new.blocks)) == {0}


class MeteredRuntime(HostRuntime):
    """A GPU whose allocator counts are set by the test."""

    def __init__(self) -> None:
        self.allocated = 1000
        self.peak = 5000  # from earlier work
        self.reserved = 7000
        self.between = 0  # reserved beside the allocated bytes, even after a release
        self.memory_of = DeviceMemory(total=100_000, free=90_000)

    def memory(self) -> DeviceMemory:
        return self.memory_of

    def reserved_bytes(self) -> int:
        return self.reserved

    def release_cached(self) -> None:
        released = max(0, self.reserved - self.allocated - self.between)
        self.reserved -= released
        self.memory_of = self.memory_of._replace(free=self.memory_of.free + released)

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def peak_bytes(self) -> int:
        return self.peak


def test_what_a_run_takes_is_told_apart() -> None:
    runtime = MeteredRuntime()

    def run() -> None:
        runtime.peak = 1600

    use = measure(runtime, run, num_graphs=2)
    assert use == MemoryUse(
        total=100_000, others=3000, weights=1000, activations=600, graphs=600 + 2 * GRAPH_BYTES
    )
    assert measure(runtime, run, num_graphs=0).graphs == 0


def test_what_weights_leave_of_their_pieces_of_memory_is_not_free() -> None:
    runtime = MeteredRuntime()
    runtime.between = 150
    use = measure(runtime, lambda: None, num_graphs=0)
    assert use == MemoryUse(total=100_000, others=3000, weights=1150, activations=0, graphs=0)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> MeteredRuntime:
    runtime = MeteredRuntime()
    runtime.memory_of = DeviceMemory(total=4 * 2**20, free=4 * 2**20)
    runtime.reserved = 0
    monkeypatch.setattr("attention_nodes.loading.open_runtime", lambda *_: runtime)
    monkeypatch.setattr("attention_nodes.loading.select_ops", lambda *names: reference)
    return runtime


@torch.inference_mode()
def block_bytes_of(checkpoint: Path) -> int:
    layers = layer_specs(load_model_config(checkpoint), torch.float32)
    return bytes_per_block(layers, block_size=4)


def test_a_node_allocates_what_its_dry_run_leaves(
    checkpoint: Path, config: NodeConfig, runtime: MeteredRuntime
) -> None:
    runner = load_runner(checkpoint, config)
    block_bytes = block_bytes_of(checkpoint)
    assert runner.num_blocks == (int(0.9 * 4 * 2**20) - 1000) // block_bytes
    assert len(runner._decoder.kv.keys[0]) == runner.num_blocks


def test_windows_of_expert_nodes_are_inside_the_budget(
    checkpoint: Path, config: NodeConfig, runtime: MeteredRuntime
) -> None:
    runtime.memory_of = DeviceMemory(total=100 * 2**20, free=100 * 2**20)
    between = changed(config, {"link.transport": "cuda_ipc", "num_experts": 3})
    runner = load_runner(checkpoint, between)
    inbox = inbox_bytes(runner.net_shape(between), "attention")
    assert 0 < inbox < 2 * 2**20  # the driver gives whole pages
    block_bytes = block_bytes_of(checkpoint)
    left = int(0.9 * 100 * 2**20) - 1000 - 3 * 2 * 2**20
    assert runner.num_blocks == left // block_bytes
    assert load_runner(checkpoint, config).num_blocks > runner.num_blocks


def test_codes_of_keys_are_inside_the_budget(
    checkpoint: Path, config: NodeConfig, runtime: MeteredRuntime
) -> None:
    """Of blocks that the dry run leaves room for some are given up for the codes of the others."""
    before = load_runner(checkpoint, config).num_blocks
    runner = load_runner(
        checkpoint, changed(config, {"kv_cache.retrieval": RetrievalPolicy(num_tokens=256)})
    )
    decoder = runner._decoder
    codes = sum(
        x.nbytes
        for each in decoder.codes.values()
        for x in (each.centroids, each.codes, each.summaries)
    )
    block_bytes = block_bytes_of(checkpoint)
    left = int(0.9 * 4 * 2**20) - 1000
    place = codes // len(decoder.codes[0].codes)
    assert runner.num_blocks < before
    assert left - block_bytes - 2 * place < runner.num_blocks * block_bytes + codes <= left


def test_a_cache_for_less_than_a_sequence_is_told(
    checkpoint: Path,
    config: NodeConfig,
    runtime: MeteredRuntime,
    caplog: pytest.LogCaptureFixture,
) -> None:
    block_bytes = block_bytes_of(checkpoint)
    config = changed(config, {"node.gpu_memory_utilization": 1.0})
    runtime.reserved = runtime.allocated + 4 * block_bytes - 1
    runtime.memory_of = DeviceMemory(total=runtime.reserved, free=0)
    with caplog.at_level(logging.WARNING, "attention"):
        assert load_runner(checkpoint, config).num_blocks == 3
    assert "3 blocks of KV cache hold 12 tokens" in caplog.text
    runtime.reserved = runtime.allocated + 2 * block_bytes - 1
    runtime.memory_of = DeviceMemory(total=runtime.reserved, free=0)
    with pytest.raises(ConfigError, match="leaves 1 blocks of KV cache"):
        load_runner(checkpoint, config)


def test_a_cache_of_a_given_size_is_rehearsed_with_on_a_gpu(
    checkpoint: Path,
    config: NodeConfig,
    runtime: MeteredRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The largest steps' kernels are compiled and shown to fit before the first request."""
    rehearsed: list[int] = []

    def steps(*args: Any, **kwargs: Any) -> list[StepPlan]:
        plans = largest_steps(*args, **kwargs)
        rehearsed.extend(len(plan.new) for plan in plans)
        return plans

    monkeypatch.setattr("attention_nodes.loading.largest_steps", steps)
    block_bytes = block_bytes_of(checkpoint)
    config = changed(config, {"node.kv_cache_bytes": 9 * block_bytes})
    load_runner(checkpoint, config)
    assert rehearsed == []
    monkeypatch.setattr(runtime, "is_asynchronous", True)
    assert load_runner(checkpoint, config).num_blocks == 9
    assert rehearsed == [3, 7, 1]


@pytest.mark.parametrize("name", ["stream_attention_weights", "largest_steps"])
def test_memory_that_ends_while_a_node_loads_is_told_with_the_numbers(
    checkpoint: Path,
    config: NodeConfig,
    runtime: MeteredRuntime,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 7 bytes")

    monkeypatch.setattr(f"attention_nodes.loading.{name}", fail)
    runtime.reserved = 3 * 2**20
    reason = "does not fit: 4.0 MiB of 4.0 MiB are free and this process has 3.0 MiB: tried to"
    with pytest.raises(ConfigError, match=reason):
        load_runner(checkpoint, config)


def test_experts_beside_take_part_in_the_dry_run(
    checkpoint: Path, config: NodeConfig, runtime: MeteredRuntime
) -> None:
    rows: list[int] = []
    versions: list[int] = []

    class Beside(SilentNet):
        def begin(self, ticket: StepTicket) -> None:
            versions.append(ticket.table_version)

        def dispatch(self, micro_batch: int, layer: int, hidden: torch.Tensor, *rest: Any) -> None:
            rows.append(len(hidden))

    net = Beside()
    opened: list[ModelRunner] = []

    def open_net(runner: ModelRunner) -> Any:
        opened.append(runner)
        return net

    load_runner(checkpoint, config, table_version=9, open_net=open_net)
    assert rows == [48, 48, 7, 7, 20, 20]  # two layers each
    assert versions == [9, 9, 9]
    assert net.is_closed
    assert opened[0].net_shape(config).hidden_size == 64
