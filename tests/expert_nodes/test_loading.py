"""Loading a node's share: the device, the kernels, and the settings refused before loading."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from expert_nodes import worker
from expert_nodes.command import accept_attention
from expert_nodes.experts import Experts
from expert_nodes.worker import load_experts, warm_up_rows
from kernels.experts.layers import LayerExperts
from kernels.runtime import DeviceMemory, HostRuntime, NoSync, Runtime
from m2n_comm.net import ExpertBatch
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.checkpoints import make_checkpoint
from tests.expert_nodes.nodes import node_config
from tests.m2n_comm.gpu.ipc_fleet import NEEDS_INTERPRETER
from tests.server.scheduler.engine import make_config
from tests.structs import changed
from topspin.errors import CheckpointError, ConfigError
from topspin.expert_table import uniform_table
from topspin.messages import Topology, Welcome
from topspin.plan.settings import Transport

pytestmark = NEEDS_INTERPRETER


def welcome_of(path: Path, *, num_nodes: int = 1, **node: str) -> Welcome:
    fields = {f"node.{name}": value for name, value in node.items()}
    config = changed(node_config(path), {**fields, "num_experts": num_nodes})
    topology = Topology(
        generation=1,
        table=uniform_table(num_layers=2, num_experts=8, num_nodes=num_nodes),
        experts=(),
        attention_incarnations=(1,),
    )
    return Welcome(config=config, topology=topology)


def answers(experts: Experts) -> torch.Tensor:
    """Compute a row with the first two experts of the last layer."""
    hidden = torch.linspace(-1, 1, 64)[None]
    slots, weights = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([[0.5, 2.0]])
    return experts.compute(ExpertBatch(0, 1, 0, hidden, slots, weights, (1,), 1))


def test_a_devices_kernels_compute_what_the_cpus_do(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    device = load_experts(path, welcome_of(path, num_nodes=2, kernels="triton"), 1)
    with NoSync():
        found = answers(device)
    host = load_experts(path, welcome_of(path, num_nodes=2, kernels="cpu"), 1)
    torch.testing.assert_close(found, answers(host), rtol=1e-4, atol=1e-5)
    assert device.has_counts
    assert host.has_counts


def test_one_node_on_a_device_counts_nothing(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    experts = load_experts(path, welcome_of(path, kernels="triton"), 0)
    answers(experts)
    assert not experts.has_counts
    host = load_experts(path, welcome_of(path, kernels="cpu"), 0)
    answers(host)
    assert host.has_counts


class FullDevice(HostRuntime):
    """A GPU of 80 GiB with 1 MiB free."""

    is_asynchronous = True

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total=80 * 2**30, free=2**20)


def test_experts_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, "mixtral", hidden_size=256, intermediate_size=128)
    opened: list[str] = []

    def open_full(device: str, kernels: str) -> FullDevice:
        opened.append(device)
        return FullDevice()

    monkeypatch.setattr(worker, "open_runtime", open_full)
    for file in path.glob("*.safetensors"):
        file.write_bytes(b"")
    # 4 of 8 experts in 2 layers, of 3 x 256 x 128 fp32 numbers each.
    with pytest.raises(
        ConfigError,
        match=r"^expert node 1: 8 experts of 384.0 KiB and 16.2 KiB of rows need 3.0 MiB on cpu, "
        r"of whose 80.0 GiB 1.0 MiB are free; use more --expert-nodes on other GPUs, "
        r"--quantization, or --expert-device cpu$",
    ) as refused:
        load_experts(path, welcome_of(path, num_nodes=2, kernels="triton"), 1)
    assert not isinstance(refused.value, CheckpointError)
    assert opened == ["cpu"]


def test_memory_that_runs_out_all_the_same_is_a_setting_that_cannot_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, "mixtral")

    def warm_up(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Experts, "warm_up", warm_up)
    with pytest.raises(
        ConfigError, match=r"^expert node 0: CUDA out of memory\. Tried .*; use more"
    ):
        load_experts(path, welcome_of(path, kernels="triton"), 0)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    with pytest.raises(ConfigError, match=r"cuda:61"):
        load_experts(path, welcome_of(path, device="cuda:61", kernels="triton"), 0)


@pytest.mark.parametrize(
    ("transport", "window_rows", "tokens", "attention_nodes", "rows"),
    [
        ("local", 4, 9, 1, (1, 2, 4, 8, 9)),  # no windows
        ("shm", 4, 9, 1, (1, 2, 4)),
        ("shm", 64, 9, 3, (1, 2, 4, 8, 16, 27)),
        ("tcp", 64, 1, 1, (1,)),
    ],
)
def test_every_power_of_two_up_to_the_largest_batch_is_warmed_up(
    tmp_path: Path,
    transport: Transport,
    window_rows: int,
    tokens: int,
    attention_nodes: int,
    rows: tuple[int, ...],
) -> None:
    plan = make_config(
        transport=transport,
        num_nodes=attention_nodes,
        max_num_seqs=1,
        max_num_batched_tokens=tokens,
    )
    link = msgspec.structs.replace(plan.link, window_rows=window_rows)
    plan = msgspec.structs.replace(plan, links=(link,))
    assert warm_up_rows(plan.for_node("expert", 0)) == rows


class FakeListener:
    """Accepts at once, and records the arguments."""

    def __init__(self) -> None:
        self.me: Identity | None = None
        self.asked: tuple[object, ...] = ()

    def accept(
        self, me: Identity, *asked: object, runtime: Runtime | None, reuse: bool, senders: object
    ) -> str:
        self.me, self.asked = me, asked
        return "host rows" if runtime is None else "device rows"


def test_what_packing_a_layer_freed_is_given_back_before_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    events: list[str] = []
    pack = LayerExperts.pack

    def packed(*args: Any, **kwargs: Any) -> Any:
        events.append("pack")
        return pack(*args, **kwargs)

    monkeypatch.setattr(LayerExperts, "pack", packed)
    monkeypatch.setattr(worker, "release_freed_memory", lambda: events.append("release"))
    load_experts(path, welcome_of(path), 0)
    assert events == ["pack", "release", "pack", "release", "release"]


@pytest.mark.parametrize(
    ("transport", "kernels", "wanted"),
    [("shm", "cpu", "host rows"), ("tcp", "triton", "device rows")],
)
def test_experts_on_a_device_get_their_rows_there(
    tmp_path: Path, transport: str, kernels: str, wanted: str
) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    welcome = welcome_of(path, kernels=kernels)
    welcome = changed(welcome, {"config.link.transport": transport})
    listener = FakeListener()
    progress = SimpleNamespace(beat=None)
    life: Any = SimpleNamespace(incarnation=1, check=None, progress=progress)
    experts = load_experts(path, welcome, 0)
    net: Any = accept_attention(listener, welcome, experts, life, index=0)  # type: ignore[arg-type]
    assert net == wanted
    assert listener.me is not None
    assert (listener.me.name, listener.me.incarnation) == ("expert 0", 1)
    assert listener.asked[:2] == ((1,), welcome.table)
    assert isinstance(listener.asked[2], Waits)
    assert listener.asked[2].policy == "block"
