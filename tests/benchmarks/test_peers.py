"""The comparison with peers starts each of them as asked, and Topspin first."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.load import compare


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []

    def main(flags: list[str]) -> int:
        calls.append(flags)
        return 0

    monkeypatch.setattr(compare, "main", main)
    return calls


def values(flags: list[str], name: str) -> list[str]:
    return [value for flag, value in pairwise(flags) if flag == name]


def test_every_target_is_started_on_its_own_port(compared: Any, tmp_path: Path) -> None:
    asked = ["--vllm", "/bin/vllm", "--llama-server", "/bin/llama", "--gguf", "/m.gguf"]
    asked += ["--ik-llama-server", "/bin/ik"]
    asked += ["--topspin", "plain=", "--topspin", "small=--quantization int4", "--rounds", "2"]
    assert peers.main([str(tmp_path), *asked]) == 0
    [flags] = compared
    targets = dict(target.split("=", 1) for target in values(flags, "--target"))
    assert list(targets) == ["plain", "small", "llama.cpp", "ik_llama.cpp", "vllm"]
    ports = [url.removesuffix("=model").rsplit(":", 1)[1] for url in targets.values()]
    assert len(set(ports)) == 5
    starts = dict(start.split("=", 1) for start in values(flags, "--start"))
    for name, port in zip(targets, ports, strict=True):
        assert f"--port {port}" in starts[name]
    assert starts["small"].endswith("--quantization int4")
    assert "--quantization" not in starts["plain"]
    assert starts["llama.cpp"].startswith("/bin/llama -m /m.gguf")
    assert starts["ik_llama.cpp"].startswith("/bin/ik -m /m.gguf")
    assert [name for name in targets if "-rtr" in starts[name]] == ["ik_llama.cpp"]
    assert f"serve {tmp_path}" in starts["vllm"]
    assert values(flags, "--rounds") == ["2"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([], "auto"),
        (["a=--port 9"], "auto"),
        (["a=--quantization int4 --attention-nodes 2", "b=--quantization int8"], "int4"),
        (["a=--quantization=int8"], "int8"),
    ],
)
def test_the_floor_is_that_of_the_first_topspin(
    compared: Any, asked: list[str], expected: str
) -> None:
    words = [word for flags in asked for word in ("--topspin", flags)]
    assert peers.main(["model", "--vllm", "/bin/vllm", *words]) == 0
    [flags] = compared
    assert values(flags, "--floor-model") == ["model"]
    assert values(flags, "--floor-quantization") == [expected]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([], "name a peer"),
        (["--gguf", "/m.gguf"], "--gguf goes together with --llama-server or --ik-llama-server"),
        (["--llama-server", "/bin/llama"], "--gguf goes together"),
        (["--ik-llama-server", "/bin/ik"], "--gguf goes together"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    compared: Any, capsys: pytest.CaptureFixture[str], asked: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        peers.main(["model", *asked])
    assert message in capsys.readouterr().err
    assert not compared
