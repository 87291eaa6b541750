"""The report: the page's content, that it needs no other file, and that pictures are drawn."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.load import compare, pictures, report
from benchmarks.load.compare import Figures
from benchmarks.load.contracts import ClientHealth, Run, Target
from benchmarks.load.sweep import Knee, Point
from tests.benchmarks.load.records import record, run_of
from topspin.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"


class _Page(HTMLParser):
    """Reads the page back: rows of tables as lists of texts, and every address in it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[str]] = {}
        self.addresses: list[str] = []
        self.text = ""
        self._row: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self._row = []
        if tag in ("td", "th"):
            self._row.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr":
            self.rows[self._row[0]] = self._row[1:]

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._row:
            self._row[-1] += data


def _run(**more: Any) -> Run:
    records = [
        record(0, 0.0, [(0.1, 1), (0.2, 1), (0.3, 1)]),
        record(1, 0.5, [(0.8, 1), (1.0, 1)], intended_s=0.4),
        record(2, 0.5, [], error_kind="http_429", end_s=0.6),
    ]
    return run_of(records, duration_s=1.0, **more)


def _page(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take any PNG for the picture: drawing takes most of the time."""
    monkeypatch.setattr(pictures, "draw_runs", lambda *_, **__: PNG)


@pytest.mark.usefixtures("undrawn")
def test_the_page_shows_the_figures_of_each_run_side_by_side(tmp_path: Path) -> None:
    slow = run_of([record(0, 0.0, [(1.0, 1), (3.0, 1)])], duration_s=4.0, settings={"seed": 7})
    report.write_report(tmp_path / "r.html", {"quick": _run(), "slow": slow}, title="two <runs>")
    page = _page(tmp_path / "r.html")
    assert "two <runs>" in page.text
    assert page.rows["Requests answered"] == ["2", "1"]
    assert page.rows["Output tokens per second"] == ["5.00", "0.50"]
    assert page.rows["TTFT, mean"] == ["250.00", "1,000"]
    assert page.rows["TPOT, mean"] == ["150.00", "2,000"]
    assert page.rows["http_429"] == ["1", "0"]
    assert page.rows["queued in the client, mean"] == ["50.00", "0.00"]
    assert page.rows["seed"] == ["-", "7"]
    assert page.rows["users"] == ["2", "2"]


def test_the_page_needs_nothing_beside_it_and_tells_no_secret(tmp_path: Path) -> None:
    target = Target("http://127.0.0.1:1", "m", api_key="s3cret", headers={"x-key": "hidden"})
    report.write_report(tmp_path / "new" / "r.html", {"a": _run(target=target)}, title="t")
    page = _page(tmp_path / "new" / "r.html")
    assert len(page.addresses) == 1
    assert page.addresses[0].startswith("data:image/png;base64,")
    text = (tmp_path / "new" / "r.html").read_text()
    assert "s3cret" not in text
    assert "hidden" not in text
    assert not re.search(r"<(script|link|iframe)", text)


@pytest.mark.usefixtures("undrawn")
def test_a_saturated_or_interrupted_run_is_called_so(tmp_path: Path) -> None:
    health = ClientHealth(0.99, 0.0, 0.2, 0.3, 0.0, 0.0, 0.0, reasons=("It used 99 % of a core.",))
    run = _run(health=health, interrupted=True, num_requested=9)
    report.write_report(tmp_path / "r.html", {"a": run}, title="t")
    page = _page(tmp_path / "r.html")
    assert "the client is saturated" in page.text
    assert "It used 99 % of a core." in page.text
    assert "interrupted after 3 of 9 requests" in page.text
    assert page.rows["Saturated"] == ["yes"]
    report.write_report(tmp_path / "good.html", {"a": _run()}, title="t")
    assert "saturated;" not in _page(tmp_path / "good.html").text


def test_latencies_are_those_of_successful_requests() -> None:
    found = report.latencies_ms(_run())
    assert found["ttft"] == pytest.approx([100, 400])
    assert found["tpot"] == pytest.approx([100, 200])
    assert found["itl"] == pytest.approx([100, 100, 200])
    assert found["e2el"] == pytest.approx([300, 600])


def test_a_png_is_drawn_also_of_runs_without_any_answer_and_of_many(tmp_path: Path) -> None:
    dead = run_of([record(0, 0.0, [], error_kind="connect", first_token_s=None)], duration_s=0.0)
    nothing = run_of([], duration_s=0.5, interrupted=True)
    rng = np.random.default_rng(0)
    many = [record(i, t, [(t + 0.1, 1), (t + 9.0, 1)]) for i, t in enumerate(rng.random(500) * 50)]
    runs = {"dead": dead, "nothing": nothing, "many": run_of(many, duration_s=60.0), "d": _run()}
    for name, drawn in (("all", runs), ("none", {"nothing": nothing})):
        report.write_report(tmp_path / f"{name}.png", drawn, title="t")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)


def test_another_suffix_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"r.pdf: a report is a file named .html or .png"):
        report.write_report(tmp_path / "r.pdf", {"a": _run()}, title="t")


def test_sweep_and_compare_are_drawn_with_gaps_in_their_figures() -> None:
    figures = {"completed": 1, "failed": 0, "output_throughput": 5.0}
    points = [
        Point(1, {**figures, "median_tpot_ms": None, "median_ttft_ms": 3.0}),
        Point(2, {**figures, "median_tpot_ms": 2.0, "median_ttft_ms": 900.0}),
        Point(4, error="refused"),
    ]
    drawn = pictures.draw_sweep(points, Knee(2, "rule"), title="t", load_name="request rate")
    assert drawn.startswith(PNG)
    dead = pictures.draw_sweep(points[2:], Knee(None, "rule"), title="t", load_name="concurrency")
    assert dead.startswith(PNG)
    rounds = [{"a": Figures(output_throughput=3.0), "b": Figures(median_ttft_ms=2.0)}]
    table = compare.summarise(rounds)
    plain = pictures.draw_compare({1: table, 16: table}, title="t")
    assert plain.startswith(PNG)
    assert pictures.draw_compare({1: table, 16: table}, title="t", floor_ms=2.0) != plain
    assert pictures.draw_compare({16: table}, title="t", floor_ms=2.0).startswith(PNG)
