"""What gpu_profile makes of kernels' times, and that it reads torch's profiler."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_profile import (
    WARM_UP_STEPS,
    Kernel,
    Row,
    main,
    read_kernels,
    short_name,
    summarise,
    table,
)


def test_times_are_added_up_per_step() -> None:
    kernels = [
        Kernel("b", 30, 40),
        Kernel("a", 10, 20),
        # On another stream, beside b and beyond it; then a gap.
        Kernel("a", 35, 45),
        Kernel("c", 36, 38),
        Kernel("b", 60, 90),
    ]
    found = summarise(kernels, 2)
    assert found.rows == [Row("b", 1.0, 20.0), Row("a", 1.0, 10.0), Row("c", 0.5, 1.0)]
    assert found.span == 40.0
    assert found.busy == (10 + 15 + 30) / 2
    assert found.idle == 12.5
    assert found.overlap == (10 + 10 + 10 + 2 + 30 - 55) / 2


def test_the_table_says_how_far_the_floor_is() -> None:
    lines = table(summarise([Kernel("a", 0, 50)], 1), {"kv": 1e6, "experts": 3e6}, 2e11)
    assert lines[1].split() == ["a", "1.0", "50.00", "50.0", "100.0%"]
    assert "a step: 50.0 us; kernels run 50.0 us of it, nothing does 0.0 us" in lines[2]
    assert lines[3] == "floor: 20.0 us at 0.20 TB/s (kv 5.0, experts 15.0); reached 40.0%"
    assert len(table(summarise([Kernel("a", 0, 50)], 1), {}, 1.0)) == 3


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("attend_short", "attend_short"),
        ("void at::native::copy<float, 4>(float*)", "at::native::copy"),
        ("void at::native::(anonymous namespace)::gather<int>(int*)", "at::native::gather"),
        ("nvjet_tst_" + "x" * 90, "nvjet_tst_" + "x" * 46),
    ],
)
def test_names_fit_their_column(name: str, short: str) -> None:
    assert short_name(name) == short


def test_it_reads_what_the_profiler_saw() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3).add_(1)
    events = profiler.events()
    kernels = read_kernels(events, DeviceType.CPU)
    assert any(each.name == "aten::add_" and each.end_us > each.begin_us for each in kernels)
    assert read_kernels(events, DeviceType.CUDA) == []


class CountingEngine:
    """Counts steps; satisfies what the profile needs of an engine."""

    def __init__(self) -> None:
        self.steps = 0
        self.finished_at: list[int] = []

    def start_decode(self, batch: int, context: int) -> None:
        assert (batch, context) == (3, 7)

    def decode_step(self) -> None:
        self.steps += 1
        torch.ones(100).cumsum_(0)

    def prefill(self, num_tokens: int) -> None:
        assert num_tokens == 5
        self.decode_step()

    def finish(self) -> None:
        self.finished_at.append(self.steps)

    def decode_floor(self) -> dict[str, float]:
        return {"kv": 1.0}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_it_runs_without_a_gpu(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = CountingEngine()
    monkeypatch.setattr("benchmarks.gpu_profile.open_engine", lambda *_: engine)
    flags = ["--device", "cpu", "--quick", "--batch", "3", "--context", "7", "--steps", "2"]
    assert main([*flags, "--prefill", "5"] if mode == "prefill" else flags) == 0
    # Nothing of the steps that warm up is left to run when others are profiled.
    assert engine.finished_at == [WARM_UP_STEPS, WARM_UP_STEPS + 2]
    lines = capsys.readouterr().out.splitlines()
    runs = next(line.split()[1] for line in lines if line.startswith("aten::cumsum_ "))
    assert runs == "1.0"
    assert lines[-1].startswith("floor: " if mode == "decode" else "a step: ")
