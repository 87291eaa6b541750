"""`topspin quantize` and `topspin sensitivity` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.quantisation.specification import parse_bits
from models.checkpoint import Checkpoint
from tests.checkpoints import make_checkpoint
from topspin.cli.main import main
from topspin.errors import ConfigError
from topspin.precision import format_of


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
        assert ours[0]["indicator"] > 100 * ours[1]["indicator"] > 0


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
