"""The comparison with peers makes the files that it needs once, and starts each server as asked."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import model_maker, peers, tables
from benchmarks.load import compare


class World:
    """What the benchmark asked for: comparisons, checkpoints, and commands of llama.cpp."""

    def __init__(self) -> None:
        self.compared: list[list[str]] = []
        self.commands: list[list[str]] = []
        self.made: list[list[str]] = []
        self.num_tables = 0

    def compare(self, flags: Sequence[str]) -> int:
        self.compared.append(list(flags))
        return 0

    def make(self, flags: Sequence[str]) -> int:
        self.made.append(list(flags))
        Path(flags[0]).mkdir(parents=True)
        (Path(flags[0]) / "config.json").touch()
        return 0

    def run(self, command: list[str], *, env: Any, check: bool) -> None:
        self.commands.append(command)
        next(Path(word) for word in command if word.endswith(".begun.gguf")).touch()

    def write_tables(self, flags: Sequence[str]) -> int:
        self.num_tables += 1
        return 0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    found = World()
    monkeypatch.setattr(compare, "main", found.compare)
    monkeypatch.setattr(model_maker, "main", found.make)
    monkeypatch.setattr(subprocess, "run", found.run)
    monkeypatch.setattr(tables, "main", found.write_tables)
    monkeypatch.setattr(peers, "resolve_model", lambda name: tmp_path / name)
    return found


def values(flags: list[str], name: str) -> list[str]:
    return [value for flag, value in pairwise(flags) if flag == name]


def flags_of(tmp_path: Path, *more: str) -> list[str]:
    tools = ["--llama-cpp", "/llama", "--ik-llama-cpp", "/ik", "--vllm", "/bin/vllm"]
    return [*tools, "--models", str(tmp_path / "models"), *more]


def test_every_server_of_a_row_is_started_on_its_own_port(world: World, tmp_path: Path) -> None:
    assert peers.main(flags_of(tmp_path, "--row", "qwen3-moe-686m", "--rounds", "2")) == 0
    [flags] = world.compared
    targets = dict(target.split("=", 1) for target in values(flags, "--target"))
    assert list(targets) == ["topspin", "topspin-one-process", "llama.cpp", "ik_llama.cpp", "vllm"]
    ports = [url.removesuffix("=model").rsplit(":", 1)[1] for url in targets.values()]
    assert len(set(ports)) == 5
    starts = dict(start.split("=", 1) for start in values(flags, "--start"))
    for name, port in zip(targets, ports, strict=True):
        assert starts[name].endswith(f"--port {port}")
    models = tmp_path / "models"
    for name in ("topspin", "topspin-one-process", "vllm"):
        assert f"serve {models}/qwen3-moe " in starts[name]
    for name, folder in (("llama.cpp", "/llama"), ("ik_llama.cpp", "/ik")):
        file = f"{models}/qwen3-moe-bf16.gguf"
        assert starts[name].startswith(f"{folder}/build/bin/llama-server -m {file} ")
    assert [name for name in targets if "-rtr" in starts[name]] == ["ik_llama.cpp"]
    assert values(flags, "--rounds") == ["2"]
    assert values(flags, "--floor-model") == [f"{models}/qwen3-moe"]
    assert values(flags, "--name") == ["peers-qwen3-moe-686m"]
    assert "-np 16 -c 8192 " in starts["llama.cpp"]
    assert world.num_tables == 1


def test_peers_have_room_for_long_prompts_and_we_retrieval(world: World, tmp_path: Path) -> None:
    assert peers.main(flags_of(tmp_path, "--row", "qwen3-moe-686m-8k")) == 0
    [flags] = world.compared
    assert values(flags, "--random-input-len") == ["8192"]
    assert values(flags, "--concurrencies") == ["1"]
    assert values(flags, "--num-prompts") == ["2"]
    starts = dict(start.split("=", 1) for start in values(flags, "--start"))
    assert "-np 1 -c 8704 " in starts["ik_llama.cpp"]
    assert "--max-num-seqs 1 " in starts["vllm"]
    assert [name for name, each in starts.items() if "--kv-retrieval" in each] == [
        "topspin-retrieval"
    ]


def test_all_rows_read_files_that_are_made_once(world: World, tmp_path: Path) -> None:
    for _ in range(2):
        assert peers.main(flags_of(tmp_path, "--result-dir", str(tmp_path))) == 0
    assert len(world.compared) == 2 * len(peers.ROWS)
    assert [each[2] for each in world.made] == ["qwen3-moe", "gpt-oss", "deepseek-v2-lite"]
    # Four checkpoints in bf16, one of them quantised too.
    assert len(world.commands) == 5
    assert sum(each[-1] == "Q4_0" for each in world.commands) == 1
    assert {path.name for path in (tmp_path / "models").glob("*.gguf")} == {
        "smollm2-moe-bf16.gguf",
        "qwen3-moe-bf16.gguf",
        "qwen3-moe-q4_0.gguf",
        "gpt-oss-bf16.gguf",
        "deepseek-v2-lite-bf16.gguf",
    }
    assert world.num_tables == 0  # the results went elsewhere


def test_in_four_bits_all_servers_read_the_same_file(world: World, tmp_path: Path) -> None:
    assert peers.main(flags_of(tmp_path, "--row", "qwen3-moe-686m-int4")) == 0
    [flags] = world.compared
    starts = dict(start.split("=", 1) for start in values(flags, "--start"))
    assert list(starts) == ["topspin", "topspin-one-process", "llama.cpp", "ik_llama.cpp"]
    assert all(f"{tmp_path}/models/qwen3-moe-q4_0.gguf" in each for each in starts.values())
    assert values(flags, "--floor-quantization") == ["int4"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([], "--llama-cpp is missing"),
        (["--llama-cpp", "/llama", "--row", "gpt"], "invalid choice: 'gpt'"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    world: World, capsys: pytest.CaptureFixture[str], asked: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        peers.main(asked)
    assert message in capsys.readouterr().err
    assert not world.compared


def test_a_failed_comparison_ends_the_rest(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "main", lambda flags: 3)
    assert peers.main(flags_of(tmp_path)) == 3
    assert world.num_tables == 0
