"""The display on pipes and on a terminal (a pseudo-terminal of the test)."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.launch.display import CompiledKernels, Display, open_display
from tests.app.launch.roles import ROOT
from topspin.logs import FORMAT_VARIABLE, json_line

SHOW = """
from app.launch.display import open_display
display = open_display()
display.line("before")
display.progress("waiting for [expert 0]", 0.5)
display.line("expert 0 | loads [bold]")
display.progress("waiting for [expert 0]", 0.6)
display.progress("waiting for attention 0", 0.7)
display.announce("ready")
display.finish()
display.line("after")
"""


def test_without_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = open_display()
    assert type(display) is Display
    display.progress("waiting", 0.5)
    display.progress("waiting", 0.6)
    display.line("expert 0 | loads")
    display.progress("nearly", 0.7)
    display.announce("ready")
    display.finish()
    shown = capsys.readouterr()
    assert shown.err == "waiting (0.5 s)\nexpert 0 | loads\nnearly (0.7 s)\n"
    assert shown.out == "ready\n"


def test_plain_lines_do_not_load_rich() -> None:
    """The supervisor runs as long as the engine: its memory counts."""
    code = SHOW + "\nimport sys\nassert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)


def test_on_a_terminal_the_state_is_redrawn_in_place() -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SHOW],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=terminal,
    )
    os.close(terminal)
    output, _ = process.communicate(timeout=20)
    assert output == b"ready\n"
    seen = b""
    try:
        while data := os.read(controller, 65536):
            seen += data
    except OSError:
        pass  # Linux's error when the last writer of a terminal has gone
    os.close(controller)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    pieces = (
        "before",
        "waiting for [expert 0] (0.5 s)",
        "expert 0 | loads [bold]",
        "waiting for [expert 0] (0.6 s)",
        "waiting for attention 0 (0.7 s)",
        "after",
    )
    places = [text.find(piece) for piece in pieces]
    assert -1 not in places, text
    assert places == sorted(places), text
    assert b"\x1b[2K" in seen  # the line is erased before it is drawn again
    assert "\n" not in text[places[3] : places[4]].strip("\r\n")


def test_a_reader_that_has_gone_ends_nothing(tmp_path: Path) -> None:
    code = (
        "from app.launch.display import Display\n"
        "display = Display()\n"
        "for number in range(3): display.announce(str(number))\n"
        f"open({str(tmp_path / 'done')!r}, 'w').close()"
    )
    reader, writer = os.pipe()
    os.close(reader)
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=True
    )
    os.close(writer)
    assert shown.stderr == b""
    assert (tmp_path / "done").exists()


def test_compiled_kernels_are_counted_while_the_engine_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kernels = CompiledKernels(Display().line)
    line = "attention 0 | 10:00:00 INFO compiled kernel attend for this processor (4.6 s)"
    assert kernels.state("starting") == "starting"
    kernels.line(line)
    kernels.line("expert 0 | loads")
    kernels.line(line)
    assert kernels.state("starting") == (
        "starting; compiling kernels for this processor, once: 2 done"
    )
    kernels.finish()
    kernels.line(line)
    assert capsys.readouterr().err == f"expert 0 | loads\n{line}\n"


def test_beside_json_the_supervisors_lines_are_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    display = open_display()
    roles_own = json_line("gateway", "gateway: listens")
    display.line(roles_own)
    display.progress("starting", 0.1)
    display.announce("ready")
    shown = capsys.readouterr()
    own, state = shown.err.splitlines()
    assert own == roles_own
    assert json.loads(state)["message"] == "starting (0.1 s)"
    assert shown.out == "ready\n"
