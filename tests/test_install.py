"""The output of `make serve` while it installs, with a pip that only writes lines."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / ".ci" / "install.py"
OUTPUT = """
WARNING: something that nobody needs
Collecting torch==2.13.0 (from topspin==0.1.0)
  Downloading https://host/torch-2.13.0%2Bcpu-cp311.whl (180.5 MB)
Collecting numpy>=1.26
Installing collected packages: torch, numpy, topspin
"""


def run(tmp_path: Path, *, status: int, stderr: int) -> subprocess.CompletedProcess[str]:
    pip = tmp_path / "pip"
    pip.mkdir()
    (pip / "__init__.py").touch()
    code = f"import sys\nprint({OUTPUT!r})\nprint(*sys.argv[1:])\nsys.exit({status})\n"
    (pip / "__main__.py").write_text(code)
    return subprocess.run(
        [sys.executable, SCRIPT, "-e", "."],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_a_terminal_there_is_a_line_per_stage(tmp_path: Path) -> None:
    done = run(tmp_path, status=0, stderr=subprocess.PIPE)
    assert done.returncode == 0
    first, second, third, last = done.stderr.splitlines()[-4:]
    assert (first, second) == ("starting pip", "finding and downloading packages")
    assert third == "installing 3 packages"
    assert last.startswith("installed in ")
    assert "WARNING" not in done.stderr


def test_a_failure_shows_what_pip_said(tmp_path: Path) -> None:
    done = run(tmp_path, status=3, stderr=subprocess.PIPE)
    assert done.returncode == 3
    assert "WARNING: something that nobody needs" in done.stderr
    assert "install --progress-bar off -e ." in done.stderr
    assert done.stderr.endswith("pip install failed with status 3\n")


def read_all(controller: int) -> Iterator[str]:
    """Yield what was written to a terminal that is closed; Linux ends it by an error."""
    with open(controller, "rb", buffering=0) as file, contextlib.suppress(OSError):
        while piece := file.read(65536):
            yield piece.decode()


def test_on_a_terminal_one_line_is_redrawn(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    done = run(tmp_path, status=0, stderr=terminal)
    os.close(terminal)
    shown = "".join(read_all(controller))
    assert done.returncode == 0
    states = shown.split("\r\x1b[K")
    assert any("packages: 1, torch (180.5 MB) (0 s)" in state for state in states)
    assert "installing 3 packages (0 s)" in states
    assert states[-1].startswith("installed in ")
    assert "WARNING" not in shown
