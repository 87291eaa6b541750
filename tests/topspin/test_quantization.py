"""What is said about the loss is what was measured."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from benchmarks.report import RESULTS
from topspin.config import ModelSection, Quantization
from topspin.quantization import LOSSES, MEASURED_ON, PLAIN_PERPLEXITY, describe_loss


def test_the_figures_are_those_of_the_benchmark() -> None:
    rows = json.loads((RESULTS / "quantization.json").read_text())["rows"]
    measured = {row["mode"]: row for row in rows if row["model"] == MEASURED_ON}
    assert measured["fp32"]["perplexity"] == PLAIN_PERPLEXITY
    assert set(LOSSES) == set(get_args(Quantization)) - {"none", "fp8"}
    for mode, loss in LOSSES.items():
        assert loss._asdict() == {name: measured[mode][name] for name in loss._fields}


@pytest.mark.parametrize("mode", sorted(LOSSES))
def test_the_loss_is_described(mode: Quantization) -> None:
    said = describe_loss(ModelSection(path="m", quantization=mode))
    assert said is not None
    assert said.startswith(f"quantization {mode}: ")
    assert f"perplexity 28.01 -> {LOSSES[mode].perplexity:.2f}" in said


def test_what_a_gpus_formats_cost_was_not_measured() -> None:
    fp8 = describe_loss(ModelSection(path="m", quantization="fp8"), "triton")
    assert fp8 is not None
    assert fp8.endswith("(LM head: fp8); its loss of quality has not been measured")
    int4 = describe_loss(ModelSection(path="m", quantization="int4"), "triton")
    assert int4 is not None
    assert "measured on smollm2-moe with the CPU's kernels" in int4


def test_nothing_is_said_without_quantization() -> None:
    assert describe_loss(ModelSection(path="m")) is None
