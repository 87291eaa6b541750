"""The step benchmark runs, and knows what its ops read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.kernels import step
from kernels.cpu.compiled.matmul.linear import block_width
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(
    not block_width(), reason="this processor leaves bf16 products to oneDNN"
)


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "bits"), [("none", 16), ("int4", 4)])
def test_every_op_and_the_bytes_of_its_weights(
    quantization: str,
    bits: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(step, "cache_bytes", lambda: 1 << 24)
    monkeypatch.setattr(step, "MATMUL_SIZE", 256)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_experts_per_tok": 2}
    path = make_checkpoint(tmp_path / "model", "mixtral", **sizes)
    flags = ["--quantization", quantization, "--steps", "3", "--context", "5", "--rows", "2"]
    flags += ["--result-dir", str(tmp_path)]
    assert step.main([str(path), *flags, "--num-threads", "2"]) == 0
    result = json.loads((tmp_path / "step.json").read_text())
    ops = result["ops"]
    name = "experts" if bits == 16 else f"int{bits} experts"
    num_layers = ops[name]["calls"]
    # Two rows choose two experts of three matrices; of 4 bits, groups of 32 have 4 bytes more.
    matrix = 64 * 64 * 2 if bits == 16 else 64 * 2 * (16 + 4)
    assert ops[name]["bytes"] == num_layers * 2 * 2 * 3 * matrix
    assert ops["attend"]["calls"] == num_layers
    assert result["ms"]["step"] > result["ms"]["layers"] > 0
    assert "GB/s" in capsys.readouterr().out


@pytest.mark.slow
def test_the_matrices_of_latents_are_read_in_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "cache_bytes", lambda: 1 << 24)
    monkeypatch.setattr(step, "MATMUL_SIZE", 256)
    path = make_checkpoint(tmp_path / "model", "deepseek_v3")
    flags = ["--quantization", "int8", "--steps", "3", "--context", "5", "--rows", "2"]
    assert step.main([str(path), *flags, "--result-dir", str(tmp_path)]) == 0
    ops = json.loads((tmp_path / "step.json").read_text())["ops"]
    # Three layers of four heads: keys of 16 and values of 12 numbers, of latents of 24.
    assert ops["heads 16 to 24"]["bytes"] == 3 * 4 * 16 * 24 * 2
    assert ops["heads 24 to 12"]["bytes"] == 3 * 4 * 24 * 12 * 2
