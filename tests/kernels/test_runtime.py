"""The host as a device, operations refused during a recording, and the list of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from kernels.runtime import CudaRuntime, HostRuntime, NoSync, open_runtime
from topspin.errors import ConfigError


def test_a_captured_body_runs_anew_on_what_its_tensors_hold_at_each_replay() -> None:
    runtime = HostRuntime()
    source, doubled = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def body() -> None:
        torch.mul(source, 2, out=doubled)

    replay = runtime.capture(body)
    assert doubled.tolist() == [0.0, 0.0], "recording computes nothing"
    replay()
    assert doubled.tolist() == [2.0, 4.0]
    source.copy_(torch.tensor([5.0, 7.0]))
    replay()
    assert doubled.tolist() == [10.0, 14.0]


def test_timed_events_tell_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([10.0, 12.5])
    monkeypatch.setattr("kernels.runtime.time.perf_counter", lambda: next(now_s))
    stream = HostRuntime().current_stream()
    began, ended = stream.record(timed=True), stream.record(timed=True)
    assert ended.is_done()
    assert ended.seconds_since(began) == 2.5


SYNCS: list[Callable[[Tensor], object]] = [
    lambda x: x[0].item(),
    lambda x: bool((x > 0).any()),
    lambda x: x.nonzero(),
    lambda x: x[x > 1],
    lambda x: x.index_put_((x > 1,), x[:2].clone()),
    lambda x: torch.masked_select(x, x > 1),
    lambda x: torch.unique(x),
    lambda x: torch.equal(x, x.clone()),
    lambda x: torch.repeat_interleave(x.long()),
]


@pytest.mark.parametrize("sync", SYNCS)
def test_what_looks_at_a_tensor_from_the_host_is_refused_in_a_recording(
    sync: Callable[[Tensor], object],
) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    sync(x)

    def body() -> None:
        sync(x)

    replay = HostRuntime().capture(body)
    with pytest.raises(AssertionError, match="no graph can hold it"):
        replay()


def test_arithmetic_gathers_and_copies_are_no_looks() -> None:
    x, index = torch.arange(6.0).view(2, 3), torch.tensor([1, 0])
    with NoSync():
        out = x[index] @ x.T
        out.copy_(out.where(out > 3, 0).softmax(-1))
        torch.index_select(x, 0, index)
        x.view(-1).scatter_(0, index, 9.0)
    assert x[0].tolist() == [9.0, 9.0, 2.0]


def test_on_the_host_everything_enqueued_has_happened() -> None:
    runtime = HostRuntime()
    event = runtime.current_stream().record()
    assert event.is_done()
    event.wait()
    buffer = runtime.host_buffer(16)
    assert (buffer.dtype, buffer.tolist()) == (torch.uint8, [0] * 16)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "rocm:0", ""])
def test_a_name_of_no_device_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="must be cpu, cuda or cuda:N"):
        open_runtime(device)


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ConfigError, match=r"device cuda: torch .* is built without CUDA"):
        open_runtime("cuda")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device cuda:2: 2 GPUs are visible"):
        open_runtime("cuda:2")


def test_the_cpu_is_a_device_of_its_own() -> None:
    assert open_runtime("cpu").device == torch.device("cpu")


def test_graphs_share_a_pool_that_somebody_is_always_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch frees a pool with its last graph, and then refuses to record into it."""
    alive: dict[object, int] = {}

    class Graph:
        def __init__(self) -> None:
            self.own: object = None

        def pool(self) -> object:
            return self.own

        def replay(self) -> None:
            pass

        def __del__(self) -> None:
            alive[self.own] -= 1

    @contextmanager
    def record(
        graph: Graph, pool: object, stream: object, capture_error_mode: str
    ) -> Iterator[None]:
        assert torch.is_inference_mode_enabled()
        assert stream == torch.device("cuda", 1)
        assert pool is None or alive[pool] > 0
        graph.own = object() if pool is None else pool
        alive[graph.own] = alive.get(graph.own, 0) + 1
        yield

    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    runtime = CudaRuntime(1)
    bodies: list[str] = []
    for name in ("first", "second"):
        replay = runtime.capture(lambda name=name: bodies.append(name))
        del replay
    assert bodies == ["first", "second"]
    assert len(alive) == 1
