"""The environments of the clients, one for each, made by pip or npm from environments.toml.

Owns their making, and whether one that is there is the one that the table asks for. They lie under
$TOPSPIN_CLIENT_ENVIRONMENTS. Knows no client.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TABLE: Mapping[str, Any] = tomllib.loads((HERE / "environments.toml").read_text())
ROOT = Path(os.environ.get("TOPSPIN_CLIENT_ENVIRONMENTS") or HERE.parents[1] / ".venvs")
NUM_SHOWN_LINES = 3


class NotBuilt(Exception):
    """An environment cannot be made: what failed, with its last lines."""


def environment(name: str) -> Path:
    """Return the environment `name` of the table, made now unless it is there.

    Raises NotBuilt, for instance where there is no network.
    """
    path, wanted = ROOT / name, repr(TABLE[name])
    stamp = path / "made-from"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(path, ignore_errors=True)
        make = _make_by_npm if "npm" in TABLE[name] else _make
        make(path, **TABLE[name])
        stamp.write_text(wanted)
    return path


def _make(
    path: Path,
    *,
    install: Sequence[str],
    remove: Sequence[str] = (),
    alias: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    _run([sys.executable, "-m", "venv", str(path)])
    pip = [str(path / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _run([*pip, "install", "--quiet", *install])
    if remove:
        _run([*pip, "uninstall", "--quiet", "--yes", *remove])
    for name, (package, version) in (alias or {}).items():
        _add_alias(path, name, package=package, version=version)


def _make_by_npm(path: Path, *, npm: Sequence[str]) -> None:
    """Install packages of npm; their programs, and `node`, are where those of pip's are."""
    path.mkdir(parents=True)
    _run(["npm", "install", "--prefix", str(path), "--no-audit", "--no-fund", "--silent", *npm])
    programs = path / "node_modules/.bin"
    programs.mkdir(exist_ok=True)
    (programs / "node").symlink_to(shutil.which("node") or "node")
    (path / "bin").symlink_to(programs)


def _add_alias(path: Path, name: str, *, package: str, version: str) -> None:
    """Let the metadata of an installed `package` be found under `name` and `version` too."""
    pattern = f"lib/python*/site-packages/{package.replace('-', '_')}-*.dist-info"
    [installed] = path.glob(pattern)
    copy = installed.with_name(f"{name}-{version}.dist-info")
    shutil.copytree(installed, copy)
    lines = (copy / "METADATA").read_text().splitlines(keepends=True)
    changed = {"Name: ": f"Name: {name}\n", "Version: ": f"Version: {version}\n"}
    for index, line in enumerate(lines):
        for head, new in changed.items():
            if line.startswith(head):
                lines[index] = new
    (copy / "METADATA").write_text("".join(lines))


def _run(command: Sequence[str]) -> None:
    # A resolver that asks for builds of a package's source would run for hours.
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise NotBuilt(f"{command[0]} is not installed") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise NotBuilt(" / ".join(lines[-NUM_SHOWN_LINES:]))
