"""The files of tuned tile sizes: what they replace, and which ones are refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kernels.triton.tiles import FOLDER, merged, read_table, table_path, tiles_for
from topspin.errors import ConfigError


@dataclass(frozen=True)
class Sizes:
    block: int = 16
    num_warps: int = 4


def write(path: Path, table: object) -> Path:
    path.write_text(json.dumps(table))
    return path


def test_an_entry_replaces_the_fields_that_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", {"mlp": {"n=8": {"block": 64}}})
    table = read_table(path)
    assert merged(table, "mlp", "n=8", Sizes(), path) == Sizes(block=64)
    assert merged(table, "mlp", "n=9", Sizes(), path) == Sizes()
    assert merged(table, "norm", "n=8", Sizes(), path) == Sizes()


def test_a_device_without_a_file_has_the_defaults(tmp_path: Path) -> None:
    assert read_table(tmp_path / "none.json") == {}
    assert tiles_for("mlp", "n=8", Sizes(block=32), torch.device("cpu")) == Sizes(block=32)


def test_files_are_named_after_devices() -> None:
    assert table_path("NVIDIA H200") == FOLDER / "nvidia_h200.json"
    assert table_path("NVIDIA A100-SXM4-80GB").name == "nvidia_a100_sxm4_80gb.json"


def test_unknown_fields_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", {"mlp": {"n=8": {"blok": 64}}})
    with pytest.raises(ConfigError, match=r"a\.json: mlp of n=8 has no tile size blok"):
        merged(read_table(path), "mlp", "n=8", Sizes(), path)


@pytest.mark.parametrize("table", [[], {"mlp": 3}, {"mlp": {"n=8": 3}}, {"mlp": {"n": {"b": 0.5}}}])
def test_what_is_no_table_is_refused(table: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.json"):
        read_table(write(tmp_path / "a.json", table))
    bad = tmp_path / "b.json"
    bad.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_table(bad)


def test_every_file_in_the_repository_is_a_table() -> None:
    for path in FOLDER.glob("*.json"):
        assert read_table(path)
