"""`topspin quantize` and `topspin sensitivity` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from app.cli.main import main
from deploy.placement.shapes import ModelShape
from deploy.quantisation.mixing import mean_bits
from deploy.quantisation.specification import parse_bits
from models.checkpoints.checkpoint import Checkpoint
from models.description.config import load_model_config
from models.quantised.precision import checkpoint_rules
from tests.checkpoints import make_checkpoint
from tests.topspin.plans import plan
from topspin.errors import ConfigError
from topspin.plan.expected import Expected, ExpectedStep
from topspin.plan.file import print_plan
from topspin.plan.precision import PrecisionRule, format_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "source", "qwen3_moe")


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    words = "the rain in the north and the wind in the south " * 6
    (tmp_path / "text.txt").write_text(words)
    (tmp_path / "held.txt").write_text("another rain, another wind: and so on, and so on")
    return ["--text", str(tmp_path / "text.txt"), "--held-out", str(tmp_path / "held.txt")]


def test_a_bound_that_is_missed_keeps_nothing(
    tmp_path: Path, source: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["quantize", str(source), "--bits", "experts=4", "-o", str(out), *texts]

    assert main([*command, "--max-kl", "1e-9"]) == 1
    assert "1e-09 is allowed" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))

    assert main([*command, "--max-kl", "5"]) == 0
    assert "mean KL" in capsys.readouterr().out
    assert (out / "tokenizer.json").exists()
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_bound_of_a_plan(
    tmp_path: Path, source: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    step = ExpectedStep(
        rows=1, context=1, micro_batches=1, attention_s=1, experts_s=1, link_s=1, step_s=1
    )
    expected = Expected(decode=step, prefill=step, ttft_s=1, tpot_s=1, tokens_per_s=1, max_kl=1e-9)
    rules = (PrecisionRule(format="int4", part="experts", layers=(1,)),)
    written = replace(plan(), expected=expected, precision=rules)
    (tmp_path / "plan.yaml").write_text(print_plan(written))
    out = tmp_path / "out"
    command = ["quantize", str(source), "--plan", str(tmp_path / "plan.yaml"), "-o", str(out)]

    assert main([*command, *texts]) == 1
    assert "1e-09 is allowed" in capsys.readouterr().err
    assert not out.exists()

    assert main([*command, *texts, "--max-kl", "5"]) == 0
    config = load_model_config(out)
    assert checkpoint_rules(out, config)["cpu"] == rules

    (tmp_path / "plan.yaml").write_text(print_plan(plan()))
    assert main([*command, *texts]) == 2
    assert "quantises nothing" in capsys.readouterr().err


def test_a_quantised_checkpoint_is_refused(
    tmp_path: Path, source: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(source), "--bits", "experts=4", "-o", str(out), *texts]) == 0
    again = str(tmp_path / "again")
    for command in (["quantize", "--bits", "8"], ["sensitivity"]):
        assert main([*command, str(out), "-o", again, *texts]) == 2
        assert "is quantised already" in capsys.readouterr().err


def test_sensitivity_has_every_part_and_format(
    tmp_path: Path, source: Path, texts: list[str]
) -> None:
    out = tmp_path / "found.json"

    assert main(["sensitivity", str(source), "-o", str(out), "--measure", "1", *texts]) == 0

    found = json.loads(out.read_text())
    assert found["model"] == Checkpoint(source).fingerprint()
    singles = {(each["layer"], each["part"], each["format"]): each for each in found["entries"]}
    wanted = {
        (layer, part, weight_format)
        for layer in (0, 1)
        for part in ("attention", "experts")
        for weight_format in ("int8", "int4", "fp8")
    } | {(None, "lm_head", "int8"), (None, "lm_head", "int4")}
    assert set(singles) == wanted
    for layer, part, _ in wanted:
        ours = singles[layer, part, "int4"], singles[layer, part, "int8"]
        assert ours[0]["kl"] > ours[1]["kl"] > 0
        assert ours[0]["indicator"] > ours[1]["indicator"] > 0


def test_a_mean_of_bits_is_kept_by_what_is_least_sensitive(
    tmp_path: Path, source: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    kls = {"attention": (0.5, 0.01), "experts": (0.02, 0.4)}
    entries = [
        {"layer": layer, "part": part, "format": name, "indicator": 1.0, "kl": kl * share}
        for part, own in kls.items()
        for layer, kl in enumerate(own)
        for name, share in (("int4", 1.0), ("int8", 0.01))
    ]
    found = {"model": Checkpoint(source).fingerprint(), "positions": 9, "entries": entries}
    (tmp_path / "found.json").write_text(json.dumps(found))
    out, flags = tmp_path / "out", ["--sensitivity", str(tmp_path / "found.json")]
    command = ["quantize", str(source), "-o", str(out), *texts, *flags]

    # Three quarters of the numbers are the experts'.
    assert main([*command, "--mean-bits", "6.7"]) == 0

    assert "predicted KL 0.039" in capsys.readouterr().out
    rules = checkpoint_rules(out, load_model_config(out))["cpu"]
    formats = {(part, at): format_of(rules, part, at, 0) for part in kls for at in (0, 1)}
    assert formats == {
        ("attention", 0): "int8",
        ("attention", 1): "int4",
        ("experts", 0): "int4",
        ("experts", 1): "int8",
    }
    shape = ModelShape.from_config(load_model_config(source))
    bits = mean_bits(rules, shape, group=32, symmetric=False)
    assert bits <= 6.7
    matrices = [
        tensor
        for name, tensor in load_file(out / "model.safetensors").items()
        if name.endswith(("packed", "scale", "point"))
    ]
    # The tiny model's scales have 32 bits, a written checkpoint's usually 16.
    stored = sum(each.nbytes / (2 if each.dtype == torch.float32 else 1) for each in matrices)
    numbers = sum(
        shape.numbers("attention", at) + 8 * shape.numbers("experts", at) for at in (0, 1)
    )
    assert stored * 8 / numbers == pytest.approx(bits)

    assert main([*command[:3], str(tmp_path / "less"), *command[4:], "--mean-bits", "4.5"]) == 2
    assert "4.625 are the least" in capsys.readouterr().err
    assert main([*command[:-2], "--mean-bits", "5"]) == 2
    assert "go together" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", {("attention", 0): "int4", ("experts", 7): "int4", ("lm_head", None): "none"}),
        (
            "8,experts[1-3,7]=4,mlp=fp8,lm_head=8",
            {
                ("experts", 2): "int4",
                ("experts", 4): "int8",
                ("experts", 7): "int4",
                ("mlp", 0): "fp8",
                ("lm_head", None): "int8",
            },
        ),
    ],
)
def test_bits(text: str, expected: dict[tuple[str, int | None], str]) -> None:
    rules = parse_bits(text)
    assert {each: format_of(rules, *each) for each in expected} == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "5", "expert=4", "experts[3-1]=4", "experts[a]=4", "experts="]
)
def test_bits_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="--bits"):
        parse_bits(text)
