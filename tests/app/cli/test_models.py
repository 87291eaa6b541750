"""`topspin models`: the families, and a checkpoint's facts beside those of its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from gguf import GGMLQuantizationType

from app.cli.main import main
from models.description.rope_config import RopeType
from models.families import FAMILIES
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from topspin.units import format_size

PUBLISHED = Path(__file__).parents[2] / "deploy" / "placement" / "models"


def test_all_families_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    told = capsys.readouterr().out
    lines = {line.split()[0]: line for line in told.splitlines() if line.strip()}
    assert lines.keys() >= FAMILIES.keys()
    words = " ".join(told.split())
    assert "scores (softmax, sigmoid, logits)" in words
    assert f"rope_type ({', '.join(get_args(RopeType))})" in words
    assert all(
        part in words for part in ("qk_norm (none, head, full)", "sliding_window", "has_sinks")
    )


def test_layers_with_a_window_keep_no_more_for_longer_contexts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As published for gpt-oss-120b, whose config.json is all that is there."""
    assert main(["models", str(PUBLISHED / "gpt-oss-120b"), "--expert-nodes", "8"]) == 0
    told = capsys.readouterr().out
    assert f"36864 bytes a token, {format_size(18 * 128 * 2 * 8 * 64 * 2)} a sequence" in told
    assert "16 experts of each layer" in told


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("gpt-oss-120b", "experts in mxfp4"),
        ("minimax-m2", "attention in int8, experts in int8"),
        ("glm-4.6", "as stored"),
    ],
)
def test_the_formats_are_those_that_serve_what_is_stored(
    name: str, served: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory is told of these: no CPU computes with fp8."""
    assert main(["models", str(PUBLISHED / name), "--expert-nodes", "8"]) == 0
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "weights" in each)
    assert " ".join(line.split()) == f"weights {served}"


def test_the_facts_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_checkpoint(tmp_path, "glm4_moe")
    assert main(["models", str(path), "--expert-nodes", "3"]) == 0
    told = capsys.readouterr().out
    # Two MoE layers, of each 3 of 8 experts: three fp32 matrices of 32 x 64.
    experts = 2 * 3 * 3 * 32 * 64 * 4
    assert f"{format_size(experts)}, 3 experts of each layer" in told
    assert "3, 2 with experts" in told
    assert "8, 3 for a token and a shared one; sigmoid" in told
    # Keys and values of 3 layers, 2 heads of 24 numbers.
    assert f"{2 * 3 * 2 * 24 * 4} bytes a token, float32" in told


def test_what_is_not_served_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe")
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**fields, "hidden_act": "gelu"}))
    assert main(["models", str(path)]) == 2
    assert "hidden_act = 'gelu'" in capsys.readouterr().err
    (path / "config.json").write_text(json.dumps(fields))
    assert main(["models", str(path), "--expert-nodes", "9"]) == 2
    assert "--expert-nodes 9" in capsys.readouterr().err


def test_a_gguf_file_has_the_facts_of_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOPSPIN_CACHE", str(tmp_path / "cache"))
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe")
    write_gguf(plain, tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_0)
    for path in (tmp_path / "tiny.gguf", tmp_path):
        assert main(["models", str(path)]) == 0
        told = capsys.readouterr().out
        assert "attention in int4, experts in int4" in told
