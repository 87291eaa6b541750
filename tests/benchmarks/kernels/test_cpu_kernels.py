"""The CPU kernels' benchmark: that it runs every op, rotates over copies, and writes figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.cli.main import main as topspin
from benchmarks.experiment import can_draw
from benchmarks.kernels import cpu_kernel_cases, cpu_kernels
from benchmarks.kernels.cpu_kernel_cases import (
    BUILDERS,
    PRECISIONS,
    KernelCase,
    KernelShape,
    cache_bytes,
    num_copies,
)
from benchmarks.kernels.cpu_kernels import Ceilings, Probe, against, figures, take_turns
from benchmarks.kernels.roofline import OpWork, Roofline

TINY = KernelShape("smollm2-moe", 64, 4, 2, 64, 4, 2, 32, 512, True)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make shapes, contexts, caches and probes small; returns the results' path."""
    monkeypatch.setattr(cpu_kernels, "SHAPES", (TINY,))
    monkeypatch.setattr(cpu_kernels, "MATMUL_SIZE", 64)
    monkeypatch.setattr(cpu_kernels, "TURN_S", 0.0)
    monkeypatch.setattr(cpu_kernel_cases, "CONTEXTS", (20,))
    monkeypatch.setattr(cpu_kernel_cases, "LONG_CONTEXTS", (40,))
    monkeypatch.setattr(cpu_kernel_cases, "PREFILLS", ((8, 20),))
    for module in (cpu_kernels, cpu_kernel_cases):
        monkeypatch.setattr(module, "cache_bytes", lambda: 1 << 16)
    return tmp_path


@pytest.mark.slow
def test_the_command_measures_every_op_and_writes_what_it_found(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ("--result-dir", str(tiny))
    assert topspin(["bench", "cpu-kernels", "--rows", "1,3", "--rounds", "2", *folder]) == 0
    result: dict[str, Any] = json.loads((tiny / "cpu_kernels.json").read_text())
    found = {(row["op"], row["precision"], row["rows"]) for row in result["rows"]}
    assert len(found) == len(result["rows"])
    weights = {(op, kind) for op in ("qkv", "o", "lm_head", "experts") for kind in PRECISIONS}
    others = ("decode attention", "prefill attention", "rms_norm", "rotate_and_store", "router")
    ops = {(op, precision) for op, precision, _ in found}
    assert ops >= weights | {(op, "bf16") for op in (*others, "permute", "greedy", "top_p draw")}
    assert ("decode attention, 8 heads a key, fp32", "fp32") in ops
    assert ops >= {("decode attention, 16 heads a latent", "bf16"), ("product", "bf16")}
    for row in result["rows"]:
        assert row["us_p50"] > 0
        assert row["bytes"] > 0
        assert row["calls"] == 2
    assert set(result["ceilings"]) == {"one_core", "all_cores"}
    assert (tiny / "cpu_kernels.png").exists() == can_draw()
    shown = capsys.readouterr().out
    assert "rotate_and_store" in shown
    assert "16 heads a latent, 3 rows: " in shown
    assert "GFLOP/s in bf16" in shown


def test_no_weights_are_read_twice_in_a_turn_and_turns_go_on_where_they_stopped(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, int]] = []

    def case(name: str, *, cold: bool) -> KernelCase:
        return KernelCase(
            name, "m", "bf16", 1, OpWork(1, 1), lambda i: called.append((name, i)), cold=cold
        )

    probe, found = Probe(1 << 16, 16), Ceilings()
    seconds = take_turns([case("a", cold=True), case("b", cold=False)], probe, found, 2)
    # One call of each before the rounds; the warm case has one more call before each turn.
    assert called == [
        *(("a", 0), ("b", 0)),
        *(("a", 0), ("b", 0), ("b", 0)),
        *(("a", 1), ("b", 1), ("b", 1)),
    ]
    assert [len(times) for times in seconds] == [2, 2]
    assert len(found.bytes_per_s) == 4
    assert len(found.bf16_per_s) == len(found.int8_per_s) == 2
    monkeypatch.setattr(cpu_kernels, "TURN_S", 3600.0)
    called.clear()
    take_turns([case("a", cold=True)], probe, found, 1)
    assert [copy for _, copy in called[1:]] == list(range(cpu_kernels.MAX_COPIES))


def test_the_cache_has_the_size_that_the_system_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "size"
    monkeypatch.setattr(cpu_kernel_cases, "_CACHE_SIZE", file)
    assert cache_bytes() == 32 << 20
    for text, size in (("2048K\n", 2 << 20), ("99M", 99 << 20), ("123", 123)):
        file.write_text(text)
        assert cache_bytes() == size


def test_copies_exceed_the_cache_or_are_as_many_as_a_turn_has_calls(tiny: Path) -> None:
    for size_bytes in (100, 5_000, 1 << 16, 1 << 24):
        copies = num_copies(size_bytes)
        assert copies == cpu_kernels.MAX_COPIES or copies * size_bytes >= 3 << 16


@torch.inference_mode()
def test_every_copy_is_its_own_memory_and_gives_the_same(tiny: Path) -> None:
    """Otherwise a rotation would find the weights in the cache, or measure something else."""
    for case in BUILDERS["lm_head"](TINY, (2,)):
        first, second = (case.call(i).clone() for i in (0, 1))
        torch.testing.assert_close(first, second)
    attention = next(iter(BUILDERS["decode_attention"](TINY, (2,))))
    assert not torch.equal(attention.call(0), attention.call(1))


def test_a_row_says_how_far_the_median_is_from_the_limit() -> None:
    case = KernelCase("o", "m", "int8", 4, OpWork(2e6, 1e6), lambda i: None)
    row = against(Roofline(2e9, 1e12), figures(case, [1e-3, 2e-3, 9e-3]))
    assert (row["us_p50"], row["gb_per_s"], row["gflop_per_s"]) == (2000.0, 1.0, 0.5)
    assert (row["roofline_us"], row["fraction"], row["bound"]) == (1000.0, 0.5, "memory")


def test_ceilings_are_what_the_machine_can_do_and_not_what_it_did_while_busy() -> None:
    half_busy = [1e9] * 50 + [2e9] * 48
    found = Ceilings([*half_busy, 10e9, 10e9, 99e9], [20e9] * 3, [40e9] * 3)
    assert found.roofline("bf16") == Roofline(10e9, 20e9)
    assert found.roofline("int4") == found.roofline("int8") == Roofline(10e9, 40e9)
    assert found.as_json() == {
        "read_gb_per_s": 10.0,
        "bf16_gflop_per_s": 20.0,
        "int8_gop_per_s": 40.0,
    }


@pytest.mark.parametrize("flags", [["--rows", "0,4"], ["--rounds", "0"], ["--ops", "nothing"]])
def test_flags_that_ask_for_nothing_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cpu_kernels.main(flags)
    assert caught.value.code == 2
