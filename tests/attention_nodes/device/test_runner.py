"""A runner on a device (Triton's kernels, interpreted) against transformers, in fp32.

Sequences join and leave, so that decode steps have changing sizes and padding; plain torch computes
the experts of two nodes in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from attention_nodes.loading import load_runner
from kernels.runtime import HostRuntime, Replay
from m2n_comm.gpu.local import DeviceNet
from m2n_comm.net import ExpertBatch
from models.checkpoints.checkpoint import Checkpoint
from models.description.config import load_model_config
from tests.attention_nodes.delayed_runtime import DelayedRuntime
from tests.attention_nodes.plans import (
    BLOCK_SIZE,
    BLOCKS_EACH,
    Planner,
    ahead,
    one_by_one,
    tokens_of,
)
from tests.checkpoints import make_checkpoint, oracle_generate
from tests.engine import engine_config
from tests.weights import load_expert_weights
from topspin.expert_table import ExpertTable, uniform_table
from topspin.plan.spec import NodeConfig

PROMPTS = {1: [5, 9, 200, 31], 2: [17, 3], 3: [40, 41, 42, 43, 44, 45, 46], 4: [250]}
# Triton's interpreter runs one program at a time: few heads, few layers.
TINY = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}


class PlainExperts:
    """One expert node of a table, in torch, without reading a tensor on the host."""

    def __init__(self, path: Path, table: ExpertTable, node: int) -> None:
        experts = [layer[node] for layer in table.slots]
        config = load_model_config(path)
        self._layers = load_expert_weights(
            Checkpoint(path), config, dtype=torch.float32, experts=experts
        ).layers
        self.seen: list[Tensor] = []

    def serve(self, batch: ExpertBatch) -> Tensor:
        self.seen.append(batch.slots.clone())
        layer = self._layers[batch.layer]
        out = torch.zeros_like(batch.hidden)
        for slot in range(len(layer.gate_up)):
            gate, up = (batch.hidden @ layer.gate_up[slot].T).chunk(2, dim=1)
            weight = (batch.weights * (batch.slots == slot)).sum(1, keepdim=True)
            out += weight * ((torch.nn.functional.silu(gate) * up) @ layer.down[slot].T)
        return out


@pytest.fixture(
    scope="module",
    params=[
        "mixtral_sliding_window",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "qwen2_moe", "olmoe")),
    ],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, **TINY)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> dict[int, list[int]]:
    result = oracle_generate(checkpoint, list(PROMPTS.values()), 9)
    assert min(result.margins) > 1e-3
    return dict(zip(PROMPTS, result.tokens, strict=True))


def config_of(path: Path, *, recordings: bool, max_num_seqs: int = 4) -> NodeConfig:
    return engine_config(
        path,
        kernels="triton",
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=32,
        recordings=recordings,
    ).for_node()


class Node:
    """A loaded runner and its net."""

    def __init__(self, path: Path, *, recordings: bool) -> None:
        self.config = config_of(path, recordings=recordings)
        with torch.inference_mode():
            self.runner = load_runner(path, self.config)
        self.net: DeviceNet | None = None
        self.experts: list[PlainExperts] = []
        model = load_model_config(path)
        if model.moe is not None:
            self.table = uniform_table(
                num_layers=len(model.moe_layers), num_experts=model.moe.num_experts, num_nodes=2
            )
            self.experts = [PlainExperts(path, self.table, node) for node in range(2)]
            self.net = DeviceNet(
                HostRuntime(),
                self.runner.net_shape(self.config),
                index=0,
                serves=[each.serve for each in self.experts],
                table=self.table,
            )

    @property
    def num_recordings(self) -> int:
        return self.runner._executor.num_recordings  # type: ignore[attr-defined]


def joining_and_leaving(m: int, *, generation: int = 1) -> Planner:
    """Decode steps of 1 to 4 sequences, back to 2, and steps with prompts between them."""
    planner = Planner(generation=generation)
    planner.add(1, PROMPTS[1])
    planner.step({1: 4})
    planner.decode([1], m=m)
    planner.add(2, PROMPTS[2])
    planner.step({1: 1, 2: 2})
    for _ in range(2):
        planner.decode([1, 2], m=m)
    planner.add(3, PROMPTS[3])
    planner.add(4, PROMPTS[4])
    planner.step({3: 5, 1: 1}, {4: 1, 2: 1})
    planner.step({3: 2, 4: 1})
    planner.decode([3, 2, 4], m=m)
    planner.decode([4, 3, 2, 1], m=m)
    planner.step({2: 1, 3: 1}, finished=[1, 4])
    planner.decode([3, 2], m=m)
    return planner


def check(tokens: dict[int, list[int]], oracle: dict[int, list[int]]) -> None:
    assert sorted(tokens) == sorted(PROMPTS)
    for seq_id, found in tokens.items():
        assert found == oracle[seq_id][: len(found)]


@pytest.mark.parametrize("m", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_recorded_steps_give_transformers_tokens(
    checkpoint: Path, oracle: dict[int, list[int]], m: int
) -> None:
    node = Node(checkpoint, recordings=True)
    plans = joining_and_leaving(m).plans
    check(tokens_of(ahead(node.runner, plans, node.net)), oracle)
    assert node.num_recordings > 0


@pytest.mark.slow
def test_enqueued_steps_give_transformers_tokens(
    checkpoint: Path, oracle: dict[int, list[int]]
) -> None:
    node = Node(checkpoint, recordings=False)
    check(tokens_of(ahead(node.runner, joining_and_leaving(2).plans, node.net)), oracle)
    assert node.num_recordings == 0


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("padded"), "mixtral", **{**TINY, "num_hidden_layers": 1}
    )


@pytest.mark.slow
def test_padding_reads_no_expert_and_writes_no_block(mixtral: Path) -> None:
    node = Node(mixtral, recordings=True)
    planner = Planner()
    for seq_id in (1, 2, 3):
        planner.add(seq_id, PROMPTS[seq_id])
    planner.step({1: 4, 2: 2, 3: 7})
    for _ in range(3):
        planner.decode([1, 2, 3])
    one_by_one(node.runner, planner.plans[:1], node.net)
    cache = node.runner._decoder.kv
    before = [each.clone() for each in (*cache.keys, *cache.values)]
    for experts in node.experts:
        experts.seen.clear()
    one_by_one(node.runner, planner.plans[1:], node.net)
    for first, second in zip(*(each.seen for each in node.experts), strict=True):
        assert len(first) == 4  # three sequences in a bucket of four
        assert (first[:3] >= 0).sum(1).add((second[:3] >= 0).sum(1)).tolist() == [2, 2, 2]
        assert first[3].tolist() == second[3].tolist() == [-1, -1]
    # Per sequence, the positions added by the three steps; the last block is at BLOCKS_EACH * n.
    written = set()
    for place, length in enumerate((4, 2, 7)):
        for position in range(length, length + 3):
            block = (place + 1) * BLOCKS_EACH - 1 - position // BLOCK_SIZE
            written.add(block * BLOCK_SIZE + position % BLOCK_SIZE)
    for was, now in zip(before, (*cache.keys, *cache.values), strict=True):
        changed = (was != now).flatten(2).any(-1).flatten().nonzero()[:, 0].tolist()
        assert set(changed) == written


@pytest.mark.slow
def test_sizes_are_recorded_before_the_first_step(mixtral: Path) -> None:
    """With a fixed number of micro-batches for that number, else for one."""
    node = Node(mixtral, recordings=True)
    cache = node.runner._decoder.kv
    before = [each.clone() for each in (*cache.keys, *cache.values)]
    with torch.inference_mode():
        node.runner.record_steps(node.net, node.config, check=lambda: None)
    assert node.num_recordings == len(node.runner._executor.sizes) == 3
    assert all(map(torch.equal, before, (*cache.keys, *cache.values)))
    assert all((each == -1).all() for experts in node.experts for each in experts.seen)
    with torch.inference_mode():
        for asked, m in ((None, 1), (2, 2)):
            node.runner._executor.forget()
            config = msgspec.structs.replace(node.config, micro_batches=asked)
            node.runner.record_steps(node.net, config, check=lambda: None)
            assert node.num_recordings == node.runner.num_recordings == 3
            recorded = node.runner._executor._recordings._replays  # type: ignore[attr-defined]
            assert {number for number, _ in recorded} == {m}


@pytest.mark.slow
def test_recorded_steps_run_ahead_of_a_device_that_is_late(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No launch waits, and memory shared by two steps is not written while one still reads it."""
    planner = Planner()
    for seq_id in (1, 2, 4):
        planner.add(seq_id, PROMPTS[seq_id])
    planner.step({1: 4, 2: 2, 4: 1})
    for _ in range(4):
        planner.decode([1, 2, 4])
    planner.step({2: 1, 4: 1}, finished=[1])
    with DelayedRuntime() as runtime:
        monkeypatch.setattr("attention_nodes.loading.open_runtime", lambda *_: runtime)
        node = Node(mixtral, recordings=True)
        runtime.synchronize()
        before = runtime.num_waits
        results = ahead(node.runner, planner.plans, node.net)
    assert runtime.num_waits - before == len(planner.plans)
    assert node.num_recordings == 1
    oracle = oracle_generate(mixtral, [PROMPTS[seq_id] for seq_id in (1, 2, 4)], 6)
    tokens = dict(zip((1, 2, 4), oracle.tokens, strict=True))
    assert tokens_of(results) == {**tokens, 1: tokens[1][:5]}


@pytest.mark.slow
def test_another_table_makes_recordings_anew(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[int] = []
    capture = HostRuntime.capture

    def count(self: HostRuntime, body: Callable[[], None]) -> Replay:
        captures.append(1)
        return capture(self, body)

    monkeypatch.setattr(HostRuntime, "capture", count)
    node = Node(mixtral, recordings=True)
    assert node.net is not None
    planner = Planner()
    planner.add(1, PROMPTS[1])
    planner.step({1: 4})
    for _ in range(2):
        planner.decode([1])
    one_by_one(node.runner, planner.plans, node.net)
    assert len(captures) == node.num_recordings == 1
    planner.table_version = 2
    table = node.table
    swapped = tuple((layer[1], layer[0]) for layer in table.slots)
    node.net.set_table(msgspec.structs.replace(table, version=2, slots=swapped))
    for old, new in zip(node.experts, reversed(node.experts), strict=True):
        assert old is not new
    # The nodes have swapped their experts.
    layers = [each._layers for each in node.experts]
    node.experts[0]._layers, node.experts[1]._layers = layers[1], layers[0]
    for _ in range(3):
        planner.decode([1])
    results = one_by_one(node.runner, planner.plans[3:], node.net)
    tokens = oracle_generate(mixtral, [PROMPTS[1]], 6).tokens[0]
    assert tokens_of(results)[1] == tokens[3:]
    assert len(captures) == 2
    assert node.num_recordings == 1
