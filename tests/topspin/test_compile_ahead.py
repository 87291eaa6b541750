"""What is compiled before an engine starts, and that nodes then find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.checkpoints import make_checkpoint
from tests.engine import engine_config
from tests.system.server import Server
from topspin import compile_ahead as module
from topspin.code_cache import KERNELS, code_directory
from topspin.compile_ahead import compile_ahead, needed_modules
from topspin.config import EngineConfig


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return engine_config(make_checkpoint(tmp_path / "model", "qwen3_moe"))


def in_place_of_compiling(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int]
) -> list[list[list[str]]]:
    """Return a list of what is to be compiled from now on; processes end with `statuses`."""
    asked: list[list[list[str]]] = []

    def compile_shares(shares: list[list[str]]) -> list[int]:
        asked.append(shares)
        return statuses

    monkeypatch.setattr(module, "_compile", compile_shares)
    return asked


def test_every_module_with_kernels_is_known(config: EngineConfig) -> None:
    quantised = msgspec.structs.replace(config.model, quantization="int4")
    either = msgspec.structs.replace(config, model=quantised)
    with_kernels = {path.stem for path in KERNELS.glob("*.py") if "\n@Kernel\n" in path.read_text()}
    assert {*needed_modules(config), *needed_modules(either)} == with_kernels


def test_only_what_nodes_need(config: EngineConfig) -> None:
    def with_compute(**changes: Any) -> EngineConfig:
        compute = msgspec.structs.replace(config.compute, **changes)
        return msgspec.structs.replace(config, compute=compute)

    assert "numba_experts" in needed_modules(config)
    assert needed_modules(with_compute(kernels="reference")) == ()
    hybrid = with_compute(kernels="auto", attention_device="cuda")
    assert needed_modules(hybrid) == ("numba_experts",)
    dense = msgspec.structs.replace(config.topology, expert_nodes=0)
    without = needed_modules(msgspec.structs.replace(config, topology=dense))
    assert "numba_attention" in without
    assert "numba_experts" not in without


def test_what_is_kept_is_not_compiled(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "code"))
    asked = in_place_of_compiling(monkeypatch, [0])
    for name in needed_modules(config):
        if name != "numba_matmul":
            directory = code_directory(KERNELS / f"{name}.py")
            assert directory is not None
            (directory / f"{name}.nbc").touch()
    compile_ahead(config)
    assert asked == [[["numba_matmul"]]]


def test_a_failure_is_told_and_nothing_else(
    config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "code"))
    in_place_of_compiling(monkeypatch, [0, 1])
    compile_ahead(config)
    assert "not compiled ahead (exit statuses [0, 1]): the nodes will" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--quantization", "int4", "--transport", "shm")])
def test_nodes_of_a_first_start_compile_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3_moe")
    code = tmp_path / "code"
    flags = ("--dtype", "bfloat16", *flags)
    with Server(checkpoint, tmp_path, *flags, env={"NUMBA_CACHE_DIR": str(code)}) as server:
        assert "compiling kernels for this processor, once" in server.output
        # What a node says that compiles.
        assert "they are kept in" not in server.output
        assert list(code.rglob("*.nbc"))
