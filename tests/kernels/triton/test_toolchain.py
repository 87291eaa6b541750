"""Triton's compiler and header are checked before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton

from kernels.triton import toolchain
from kernels.triton.ops import check_device
from topspin.errors import ConfigError


def test_what_is_there_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain.find_compiler() == str(compiler)
    monkeypatch.setenv("CC", "clang")
    assert toolchain.find_compiler() is None


def test_a_gpu_without_a_compiler_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="neither gcc nor clang on PATH; install gcc"):
        check_device("cuda:0")
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ConfigError, match="CC=no-such-compiler is none"):
        check_device("cuda:0")


def test_a_gpu_without_pythons_headers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(toolchain, "find_compiler", lambda: "/usr/bin/gcc")
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"header Python\.h of this Python .*python3-dev"):
        check_device("cuda:0")
    (tmp_path / "Python.h").write_text("")
    check_device("cuda:0")
