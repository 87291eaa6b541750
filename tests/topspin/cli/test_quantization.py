"""What is said about the loss is what was measured."""

from __future__ import annotations

import json

import pytest

from benchmarks.report import RESULTS
from kernels.dispatch import QUANTIZATIONS
from topspin.cli.quantization import LOSSES, MEASURED_ON, PLAIN_PERPLEXITY, describe_loss
from topspin.config import ModelSection, Quantization
from topspin.devices import Nodes, Place


def test_the_figures_are_those_of_the_benchmark() -> None:
    rows = json.loads((RESULTS / "quantization.json").read_text())["rows"]
    measured = {row["mode"]: row for row in rows if row["model"] == MEASURED_ON}
    assert measured["fp32"]["perplexity"] == PLAIN_PERPLEXITY
    for kernels, modes in QUANTIZATIONS.items():
        assert set(LOSSES[kernels]) == set(modes)
        for mode, loss in LOSSES[kernels].items():
            row = measured[mode if kernels == "cpu" else f"gpu-{mode}"]
            assert loss._asdict() == {name: row[name] for name in loss._fields}


def some_nodes(kernels: str, *, num_experts: int = 1) -> Nodes:
    place = Place("cpu" if kernels == "cpu" else "cuda", kernels)
    return Nodes(1, num_experts, place, place)


@pytest.mark.parametrize(
    ("kernels", "mode"), [(kernels, mode) for kernels in LOSSES for mode in LOSSES[kernels]]
)
def test_the_loss_is_described(kernels: str, mode: Quantization) -> None:
    said = describe_loss(ModelSection(path="m", quantization=mode), some_nodes(kernels))
    assert said is not None
    head = "fp8" if mode == "fp8" else "int8"
    assert said.startswith(f"quantization {mode}: ")
    assert f"(LM head: {head})" in said
    assert f"perplexity 28.01 -> {LOSSES[kernels][mode].perplexity:.2f}" in said
    assert ("with a GPU's formats, by a CPU" in said) == (kernels == "triton")
    assert (f"--modes gpu-{mode}`" in said) == (kernels == "triton")


def test_without_experts_the_kernels_of_attention_count() -> None:
    nodes = some_nodes("cpu", num_experts=0)._replace(attention=Place("cuda", "triton"))
    said = describe_loss(ModelSection(path="m", quantization="fp8"), nodes)
    assert said is not None
    assert f"-> {LOSSES['triton']['fp8'].perplexity:.2f}" in said


def test_nothing_is_said_without_quantization() -> None:
    assert describe_loss(ModelSection(path="m"), some_nodes("cpu")) is None
