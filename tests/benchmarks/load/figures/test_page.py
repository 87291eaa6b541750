"""The report: the page's content, that it needs no other file, and that it tells no secret."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.load.contracts import ClientHealth, Target
from benchmarks.load.figures import page
from tests.benchmarks.load.records import record, run_of


class _Page(HTMLParser):
    """Reads the page back: its text, and every address in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data

    def row(self, name: str) -> list[str]:
        line = next(each for each in self.text.splitlines() if name in each)
        return line.partition(name)[2].replace("\u2502", " ").split()


ANSWERED = [
    record(0, 0.0, [(0.1, 1), (0.2, 1), (0.3, 1)]),
    record(1, 0.5, [(0.8, 1), (1.0, 1)], intended_s=0.4),
    record(2, 0.5, [], error_kind="http_429", end_s=0.6),
]


def test_a_report_shows_runs_side_by_side_and_tells_no_secret(tmp_path: Path) -> None:
    health = ClientHealth(0.99, 0.0, 0.2, 0.3, 0.0, 0.0, 0.0, reasons=("It used 99 % of a core.",))
    target = Target("http://127.0.0.1:1", "m", headers={"x-key": "hidden"})
    runs = {
        "quick": run_of(ANSWERED, duration_s=1.0, target=target, health=health),
        "slow": run_of([record(0, 0.0, [(1.0, 1), (3.0, 1)])], duration_s=4.0, settings={"a": 7}),
        # Nothing was answered, and nothing was sent.
        "dead": run_of(
            [record(0, 0.0, [], error_kind="connect", first_token_s=None)], duration_s=0
        ),
        "nothing": run_of([], duration_s=0.5, interrupted=True, num_requested=9),
    }
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "r.html"
    page.write_report(path, runs, title="four <runs>")
    shown = _Page(path)
    assert "four <runs>" in shown.text
    assert shown.row("Successful requests") == ["2", "1", "0", "0"]
    assert shown.row("Output token throughput (tok/s)") == ["5.00", "0.50", "0.00", "0.00"]
    assert shown.row("Time to first token")[:2] == ["250.00", "250.00"]
    assert "1 x http_429" in shown.text
    assert "THE CLIENT IS SATURATED" in shown.text
    assert "It used 99 % of a core." in shown.text
    assert "9 requests did not finish" in shown.text
    assert [each.partition(",")[0] for each in shown.addresses] == ["data:image/png;base64"]
    text = path.read_text()
    assert "hidden" not in text
    assert not re.search(r"<(script|link|iframe)", text)
