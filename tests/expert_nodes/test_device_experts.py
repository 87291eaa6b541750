"""Experts with a GPU's kernels: their results and counts, and that they never wait.

Interpreted without a GPU, on the GPU with one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expert_nodes.experts import Experts
from expert_nodes.memory import ExpertSize, batch_bytes, lacking, measure_expert, shortage
from expert_nodes.tables import TableChange
from expert_nodes.versions import Held
from kernels import reference
from kernels.dispatch import Ops, select_ops
from kernels.runtime import DeviceMemory, HostRuntime, NoSync, open_runtime
from kernels.triton.grouped_mlp.weights import GpuWeight, unpack_weight
from m2n_comm.net import ExpertBatch, NetShape
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.expert_reader import ExpertReader
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint
from tests.expert_nodes import nodes
from tests.expert_nodes.nodes import node_config, table_of, taken
from tests.structs import changed
from tests.weights import load_expert_weights
from topspin.messages import TablePrepared, unpack_ints
from topspin.plan.precision import Format
from topspin.plan.settings import Transport

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
FIRST: Held = ((0, 1, 2), (5, 6))
SECOND: Held = ((2, 7, 0), (5, 6))
THIRD: Held = ((4,), (1, 3, 5, 7))
NUM_ROWS = 5
FORMATS = ("none", "int8", "int4", "fp8")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("device"), "mixtral")


def ops_of(mode: Format = "none") -> Ops:
    return select_ops("triton", torch.float32, [] if mode == "none" else [mode], device=DEVICE)


def load(path: Path, held: Held, mode: Format = "none", **options: Any) -> Experts:
    options = {"runtime": open_runtime(DEVICE), **options}
    return nodes.load(path, held, kernels="triton", mode=mode, device=DEVICE, **options)


def batch_of(held: Held, layer: int, version: int) -> ExpertBatch:
    """A batch that uses every slot; one row uses none."""
    generator = torch.Generator().manual_seed(layer)
    count = len(held[layer])
    slots = torch.arange(NUM_ROWS * 2, dtype=torch.int32).view(NUM_ROWS, 2) % count
    slots[1, 0] = -1
    slots[3] = -1
    hidden = torch.randn(NUM_ROWS, 64, generator=generator)
    weights = torch.rand(NUM_ROWS, 2, generator=generator)
    tensors = (hidden.to(DEVICE), slots.to(DEVICE), weights.to(DEVICE))
    return ExpertBatch(0, layer, 0, *tensors, (NUM_ROWS,), version)


def compute(experts: Experts, held: Held, version: int) -> list[Tensor]:
    """Compute a batch of every layer; reading a tensor on the host is refused."""
    batches = [batch_of(held, layer, version) for layer in range(2)]
    with NoSync():
        return [experts.compute(batch) for batch in batches]


def used(held: Held, times: int) -> list[list[int]]:
    """Return how often each slot is used when batch_of() is computed `times` times."""
    found = []
    for layer, experts in enumerate(held):
        slots = batch_of(held, layer, 1).slots.flatten().tolist()
        found.append([times * slots.count(slot) for slot in range(len(experts))])
    return found


def wanted(path: Path, held: Held, experts: Experts, quantization: Format) -> list[Tensor]:
    """Compute the same with plain torch, from the checkpoint or from the dequantised weights."""
    plain = load_expert_weights(
        Checkpoint(path), load_model_config(path), dtype=torch.float32, experts=held
    )
    results = []
    for layer, (weights, packed) in enumerate(
        zip(plain.layers, experts._versions.newest.layers, strict=True)
    ):
        gate_up, down = list(weights.gate_up), list(weights.down)
        if quantization != "none":
            gate_up, down = meant(packed.gate_up), meant(packed.down)
        batch = batch_of(held, layer, 1)
        rows = (batch.hidden.cpu(), batch.slots.cpu(), batch.weights.cpu())
        results.append(reference.grouped_mlp(*rows, reference.pack_experts(gate_up, down)).out)
    return results


def meant(weights: list[object]) -> list[Tensor]:
    """Return the dequantised matrices."""
    found = []
    for weight in weights:
        assert isinstance(weight, GpuWeight)
        found.append(unpack_weight(weight).cpu())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "int4"])
def test_partial_sums_and_counts_equal_plain_torchs_under_several_tables(
    path: Path, quantization: Format
) -> None:
    reader = nodes.reader_of(path, device=DEVICE)
    experts = load(path, FIRST, quantization)
    first = compute(experts, FIRST, 1)
    for got, want in zip(first, wanted(path, FIRST, experts, quantization), strict=True):
        if quantization == "fp8":  # rounds rows and units to 3 bits of mantissa
            assert float((got.cpu() - want).norm() / want.norm()) < 0.06
        else:
            torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-4)
        assert not got[3].any()
    tables = {1: FIRST, 2: SECOND, 3: THIRD} if quantization == "none" else {1: FIRST, 2: SECOND}
    for version, held in list(tables.items())[1:]:
        nodes.prepare(experts, version, held, reader)
        if version == 2:  # the table in use still works
            assert all(map(torch.equal, compute(experts, FIRST, 1), first))
        fresh = load(path, held, quantization)
        assert all(map(torch.equal, compute(experts, held, version), compute(fresh, held, 1)))
    assert taken(experts) == {
        version: used(held, 2 if version == 1 else 1) for version, held in tables.items()
    }


def test_counts_are_added_on_the_device_and_start_again_when_they_are_taken(path: Path) -> None:
    experts = load(path, FIRST)
    batch = batch_of(FIRST, 0, 1)
    experts.compute(batch)
    assert taken(experts) == {1: [used(FIRST, 1)[0], [0, 0]]}
    replay = experts.runtime.capture(lambda: (experts.compute(batch), None)[1])
    for times in (1, 2):
        for _ in range(times):
            replay()
        (found,) = experts.take_counts()
        assert list(unpack_ints(found.counts[0])) == used(FIRST, times)[0]
        assert (found.activations, found.batches) == (3 * times, times)
    assert taken(experts) == {}


@pytest.mark.slow
def test_counting_can_be_left_out(path: Path) -> None:
    experts = load(path, FIRST, counts=False)
    compute(experts, FIRST, 1)
    assert not experts.has_counts
    assert taken(experts) == {}


def test_the_warm_up_runs_every_layer_and_all_sizes_of_each_shape(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = load(path, ((0, 1), (2, 3)))
    ran: list[tuple[int, int]] = []
    real = experts._ops.grouped_mlp

    class Recording:
        def grouped_mlp(
            self, hidden: Tensor, slots: Tensor, weights: Tensor, held: object, out: None
        ) -> object:
            ran.append((len(hidden), int(slots.max()) + 1))
            return real(hidden, slots, weights, held)  # type: ignore[arg-type]

        def add_counts(self, totals: Tensor, counts: Tensor) -> None:
            pass

    monkeypatch.setattr(experts, "_ops", Recording())
    experts.warm_up((1, 2, 3))
    assert ran == [(1, 2), (2, 2), (3, 2), (3, 2)]
    assert taken(experts) == {}


# Memory.


class SmallDevice(HostRuntime):
    """A device with the given amount of free memory; tests may set `free`."""

    device = torch.device(DEVICE)
    is_asynchronous = True

    def __init__(self, free: int, cached: int = 0) -> None:
        self.free = free
        self._cached = cached

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total=2**20, free=self.free, cached=self._cached)


@pytest.mark.parametrize("quantization", FORMATS)
def test_an_experts_size_is_that_of_what_is_kept(path: Path, quantization: Format) -> None:
    experts = load(path, FIRST, quantization)
    found = set()
    for layer in experts._versions.newest.layers:
        for pair in zip(layer.gate_up, layer.down, strict=True):
            size = 0
            for weight in pair:
                assert isinstance(weight, GpuWeight)
                size += weight.data.nbytes
                size += 0 if weight.scales is None else weight.scales.nbytes
            found.add(size)
    ops = ops_of(quantization)
    size = measure_expert(ops, load_model_config(path), torch.float32, quantization)
    assert found == {size.kept}
    if quantization == "none":
        assert size == ExpertSize(3 * 64 * 48 * 4, 0)
    else:
        assert size.packing >= 2 * 64 * 48 * 4


def test_what_is_missing_is_named_in_bytes() -> None:
    device, size = torch.device("cuda", 1), ExpertSize(kept=2**20, packing=2**19)
    memory = DeviceMemory(total=2**30, free=2**20, cached=2**20)
    assert shortage({size: 1}, memory, device) is None
    assert shortage({size._replace(packing=0): 2}, memory, device) is None
    assert shortage({size: 2}, memory, device) == (
        "2 experts of 1.0 MiB need 2.5 MiB on cuda:1, of whose 1.0 GiB 2.0 MiB are free"
    )
    small = ExpertSize(kept=2**18, packing=2**20)
    assert shortage({size: 1, small: 2}, memory, device) == (
        "1 experts of 1.0 MiB and 2 experts of 256.0 KiB need 2.5 MiB on cuda:1, "
        "of whose 1.0 GiB 2.0 MiB are free"
    )


@pytest.mark.parametrize(
    ("transport", "kernels", "want"),
    [
        # Two attention nodes, and 8 rows of 64 fp32 numbers, 2 slots and 2 weights from each.
        ("shm", "triton", 2 * 8 * (64 * 4 + 2 * 8)),
        # Two of the driver's pages hold the windows of four micro-batches.
        ("cuda_ipc", "triton", 2 * 8 * (64 * 4 + 2 * 8) + 2 * 2 * 2**20),
        ("local", "triton", 0),
        ("local", "cpu", 2 * 8 * (64 * 4 + 2 * 8)),
    ],
)
def test_rows_take_memory_beside_experts_unless_nodes_share_it(
    path: Path, transport: Transport, kernels: str, want: int
) -> None:
    fields = {
        "link.transport": transport,
        "num_attention": 2,
        "node.kernels": kernels,
        "shares_device": (transport, kernels) == ("local", "triton"),
    }
    config = changed(node_config(path), fields)
    shape = NetShape(
        hidden_size=64,
        top_k=2,
        num_layers=2,
        payload=torch.float32,
        window_rows=8,
        num_micro_batches=4,
        deadline_s=1.0,
    )
    assert batch_bytes(config, shape) == want
    memory = DeviceMemory(total=2**30, free=2**20)
    device, size = torch.device("cuda", 1), ExpertSize(kept=2**20, packing=0)
    message = shortage({size: 1}, memory, device, batches=2**19)
    assert message is not None
    assert message.startswith("1 experts of 1.0 MiB and 512.0 KiB of rows need 1.5 MiB on cuda:1")


def test_the_hosts_memory_is_not_counted(path: Path) -> None:
    ops, config = ops_of(), load_model_config(path)
    assert (
        lacking(HostRuntime(), ["none"] * 10**5, ops=ops, model=config, dtype=torch.float32) is None
    )
    assert (
        lacking(SmallDevice(100), ["none"], ops=ops, model=config, dtype=torch.float32) is not None
    )


ALL: Held = (tuple(range(8)),) * 2
"""Held by the other node."""


@pytest.mark.slow
def test_a_table_that_does_not_fit_is_not_prepared(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expert_bytes = 3 * 64 * 48 * 4
    device = SmallDevice(expert_bytes - 1)
    experts = load(path, FIRST, runtime=device)
    before = compute(experts, FIRST, 1)
    change = TableChange(experts, model_path=path, config=node_config(path), index=0)
    change.start(table_of(2, SECOND, ALL))  # one expert more
    assert change.is_busy
    answer = change.work()
    assert answer is not None
    assert answer.refusal.startswith("1 experts of 36.0 KiB need")
    assert not change.is_busy
    assert "table 2 is not prepared, the one in use stays: 1 experts of 36.0 KiB" in caplog.text
    assert experts.versions == [1]
    device.free = expert_bytes
    change.start(table_of(2, SECOND, ALL))
    while change.is_busy:
        answer = change.work()
    assert answer == TablePrepared(role="expert", index=0, version=2)
    assert experts.versions == [1, 2]
    assert all(map(torch.equal, compute(experts, FIRST, 1), before))


def test_memory_that_others_have_taken_meanwhile_ends_the_change(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    experts = load(path, FIRST, runtime=SmallDevice(2**20))
    change = TableChange(experts, model_path=path, config=node_config(path), index=0)
    change.start(table_of(2, SECOND, ALL))

    def read(*_: object, **__: object) -> Iterator[None]:
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setattr(ExpertReader, "read", read)
    answers = []
    while change.is_busy:
        answers.append(change.work())
    refusal = TablePrepared(role="expert", index=0, version=2, refusal="CUDA out of memory")
    assert answers == [None] * (len(answers) - 1) + [refusal]
    assert "table 2 is not prepared, the one in use stays: CUDA out of memory" in caplog.text
    assert experts.versions == [1]
    compute(experts, FIRST, 1)
