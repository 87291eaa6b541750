"""The speed of two checkouts in turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import paired
from topspin.errors import ConfigError


def make_tree(folder: Path, step_ms: float) -> None:
    """Make a checkout whose `topspin` writes a result, and notes that it has run."""
    results = folder / "benchmarks" / "results"
    binaries = folder / ".venv" / "bin"
    results.mkdir(parents=True)
    binaries.mkdir(parents=True)
    result = {"rows": [{"size": 4096, "name": "shm", "step_ms": step_ms}], "machine": {"a_s": 1}}
    script = binaries / "topspin"
    script.write_text(
        f"#!/bin/sh\necho {folder.name} $* >> ../order\n"
        f"echo '{json.dumps(result)}' > benchmarks/results/step.json\n"
    )
    script.chmod(0o755)


def test_figures_of_both_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path / "before", 2.0)
    make_tree(tmp_path / "now", 3.0)
    monkeypatch.setattr(paired, "ROOT", tmp_path / "now")
    flags = [str(tmp_path / "before"), "step", "--rounds", "2", "--result-dir", str(tmp_path)]
    assert paired.main([*flags, "--", "bench", "step", "--rows", "1"]) == 0
    written = json.loads((tmp_path / "paired.json").read_text())
    (figure,) = written["figures"]
    assert figure == {
        "figure": "rows[0 4096 shm].step_ms",
        "before": 2.0,
        "now": 3.0,
        "ratio": 1.5,
    }
    order = (tmp_path / "order").read_text().splitlines()
    assert order == [f"{tree} bench step --rows 1" for tree in ("now", "before", "before", "now")]


def test_a_command_that_fails_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "ROOT", tmp_path / "not there")
    with pytest.raises(ConfigError, match=r"not there: .*No such file"):
        paired.main([str(tmp_path), "step", "--no-write", "--", "bench", "step"])
