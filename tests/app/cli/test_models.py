"""`topspin models`: the families, and a checkpoint's facts beside those of its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.main import main
from models.families import FAMILIES
from tests.checkpoints import make_checkpoint
from topspin.units import format_size


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return what a table says by the names in its first column."""
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    return {words[0]: words[-1].strip() for words in lines if len(words) == 2}


def test_all_families_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert said(capsys).keys() >= FAMILIES.keys()


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
