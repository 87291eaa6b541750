"""The files that a streamed token passes: those of docs/architecture.md, and not too many."""

from __future__ import annotations

import pytest

from benchmarks.token_path import ROOT, Visit, files_of_page, follow, page_lines, visits
from models.sources.hub import DEFAULT_MODEL

MOST_FILES = 107
"""A feature that puts a token through one more file is to take it out of another."""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_page_lists_the_files_of_today() -> None:
    # What only one of two runs passes is a wait that the machine's other work made longer.
    found, again = ({visit.file for visit in follow(DEFAULT_MODEL)} for _ in range(2))
    found &= again
    assert sorted(found) == sorted(files_of_page())
    assert len(found) <= MOST_FILES


def test_what_waiting_calls_too_is_left_out() -> None:
    """Windows 1 and 2 have a request, 3 and 4 have none; a function of one window is chance."""
    file, other = "server/scheduler/service.py", "server/scheduler/gateways.py"
    calls = [
        [window, str(ROOT / path), name, 10 * window + delay]
        for path, name, delay, windows in [
            (file, "Service._turn", 2, (1, 2)),
            (file, "Service._send", 1, (1, 2, 3)),
            (file, "Service.wait", 0, (1, 2, 3, 4)),
            (other, "once", 0, (1,)),
            ("/elsewhere/library.py", "of_others", 0, (1, 2)),
        ]
        for window in windows
    ]
    record = {"command": ["python", "-m", "server.scheduler", "--config"], "calls": calls}
    found = visits([record], begun_ns=[10, 20])
    assert found == [Visit("server.scheduler", file, ("Service._send", "Service._turn"))]
    assert "1 files" in page_lines(found)
    assert f"1. `{file}` (server.scheduler): `Service._send`, `Service._turn`" in page_lines(found)
