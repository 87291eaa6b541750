"""Directories of compiled code: where they are, and when there is nothing in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from topspin.code_cache import KERNELS, PORTABLE_VARIABLE, code_directory, is_missing

MODULE = KERNELS / "numba_layer.py"


def test_a_directory_per_module_and_where_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba's"))
    found = code_directory(MODULE)
    assert found is not None
    assert found.parent == tmp_path / "numba's"
    assert found.is_dir()
    assert code_directory(KERNELS / "numba_matmul.py") != found
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("TOPSPIN_CACHE", str(tmp_path))
    assert code_directory(MODULE) == tmp_path / "numba" / found.name


def test_other_sources_have_other_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    copies = []
    for name, text in (("a.py", "x = 1"), ("b.py", "x = 1"), ("c.py", "x = 2")):
        (tmp_path / name).write_text(text)
        copies.append(code_directory(tmp_path / name))
    assert copies[0] == copies[1] != copies[2]


def test_code_is_missing_until_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert is_missing(MODULE)
    directory = code_directory(MODULE)
    assert directory is not None
    (directory / "kernels_1").mkdir()
    assert is_missing(MODULE)
    (directory / "kernels_1" / "numba_layer._route-1.py311.1.nbc").touch()
    assert not is_missing(MODULE)


def test_without_a_place_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert code_directory(MODULE) is None
    assert not is_missing(MODULE)


def test_looking_needs_neither_numba_nor_torch() -> None:
    program = (
        "import sys, topspin.compile_ahead\n"
        "assert not {'numba', 'torch', 'kernels'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=KERNELS.parent, timeout=60)


def test_the_processors_variable_is_part_of_the_name(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from topspin.code_cache import *; "
        "print(code_directory(KERNELS / 'numba_layer.py'))"
    )
    names = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            cwd=KERNELS.parent,
            env={"NUMBA_CACHE_DIR": str(tmp_path), PORTABLE_VARIABLE: portable},
            timeout=60,
        ).stdout
        for portable in ("0", "1")
    }
    assert len(names) == 2
