"""`topspin trace`: fetch the stamps of a running server, write them, and report.

Owns the flags, the HTTP call, the files and the text. The numbers are report.py's, the forms
export.py's and plot.py's. Loaded by app.cli.main.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec

from app.cli.flags import add_url, key_header
from app.cli.trace.accounts import accounts_of, explained
from app.cli.trace.drafts import drafting_of
from app.cli.trace.export import chrome_trace
from app.cli.trace.plot import draw_gantt, gantt_window
from app.cli.trace.report import Lane, TraceReport, lanes_of, make_report
from topspin.errors import ConfigError, EngineUnavailable
from topspin.messages import Trace

TIMEOUT_S = 15.0
PICTURES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_url(parser)
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="how far back (%(default)s)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("trace.json"),
        metavar="FILE",
        help="what its name says: .json for Chrome and Perfetto, .png, .svg or .pdf for the Gantt "
        "chart (%(default)s)",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the Gantt chart")


def run(parsed: argparse.Namespace) -> int:
    """Write what the server's nodes did lately and print the report; returns 0.

    Raises ConfigError for an answer that cannot be used, EngineUnavailable without one.
    """
    url, output = parsed.url, parsed.output
    pictures = [parsed.png] * (parsed.png is not None)
    suffix = output.suffix.lower()
    if suffix in PICTURES:
        pictures.append(output)
    elif suffix != ".json":
        raise ConfigError(f"-o {output}: its name must end in .json, {', '.join(PICTURES)}")
    found = fetch(url, parsed.seconds)
    lanes = lanes_of(found)
    if suffix == ".json":
        output.write_bytes(msgspec.json.encode(chrome_trace(lanes)))
        print(f"written: {output} (open it in https://ui.perfetto.dev)")
    report = make_report(lanes)
    for name in found.missing:
        print(f"{name} did not answer in time")
    print(describe(report, lanes))
    for picture in pictures:
        start_ns, end_ns = gantt_window(lanes)
        draw_gantt(lanes, picture, title=f"The rally at {url}", start_ns=start_ns, end_ns=end_ns)
        print(f"written: {picture}")
    return 0


def fetch(url: str, seconds: float) -> Trace:
    """Return the answer of GET /trace; raises ConfigError or EngineUnavailable."""
    try:
        answer = httpx.get(
            f"{url}/trace",
            params={"seconds": seconds},
            headers=key_header(),
            timeout=TIMEOUT_S,
        )
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"{url}: {error or type(error).__name__}") from error
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url}: {error}") from error
    if answer.status_code >= 500:
        raise EngineUnavailable(f"{url}/trace: {answer.status_code}: {answer.text[:200]}")
    try:
        if answer.status_code == 200:
            return msgspec.json.decode(answer.content, type=Trace)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{url}/trace: not a trace of this version: {error}") from error
    raise ConfigError(f"{url}/trace: {answer.status_code}: {answer.text[:200]}")


def describe(report: TraceReport | None, lanes: Sequence[Lane]) -> str:
    """Return the report as text."""
    if report is None:
        return "no whole step was recorded: was the engine idle, or started without trace.enabled?"
    lines = [
        f"{report.num_steps} steps of m = {report.num_micro_batches}, {report.num_layers} MoE "
        f"layers: {_ms(report.step_s)} each (median, without sampling)",
        f"T_a {_ms(report.t_a_s)}  T_e {_ms(report.t_e_s)}  T_c {_ms(report.t_c_s)}  "
        f"wait for the scheduler {_ms(report.gap_s)}",
    ]
    if (formula_s := report.formula_s()) is not None:
        ratio = formula_s / report.step_s
        lines.append(f"formula of full overlap: {_ms(formula_s)} ({ratio:.0%} of the measured)")
    bubbles = [
        f"{role} {share:.0%}"
        for role in ("attention", "expert")
        if (share := report.bubble(role)) is not None
    ]
    lines.append("bubbles: " + ", ".join(bubbles))
    lines += _accounts(report, lanes)
    lines += [
        f"{each.name}: {each.num_passes} passes of {_ms(each.pass_s)} (median), {each.overlap:.0%} "
        "of their time while attention nodes were in a step"
        for each in drafting_of(lanes)
    ]
    lines.append(_straggler(report))
    if error_ns := max((lane.error_ns for lane in lanes), default=0):
        lines.append(f"clocks of the nodes are known to within {error_ns / 1e6:.3f} ms")
    return "\n".join(lines)


def _accounts(report: TraceReport, lanes: Sequence[Lane]) -> list[str]:
    """Return lines per attention node: where its time goes between two results."""
    experts = [lane for lane in lanes if lane.role == "expert"]
    lines = []
    for lane in lanes:
        if lane.role != "attention":
            continue
        found = accounts_of(lane, experts, report.steps, report.t_c_s)
        total_s = sum(each.seconds for each in found)
        lines.append(
            f"{lane.name}: {_ms(total_s)} from result to result, {explained(found):.1%} explained"
        )
        lines += [
            f"  {each.seconds * 1e3:8.3f} ms {each.seconds / total_s:4.0%}  {each.name}"
            for each in found
        ]
    return lines


def _straggler(report: TraceReport) -> str:
    if not report.what_if:
        return "slowest peer: no role has several nodes to compare"
    worst = report.what_if[0]
    return f"slowest peer: {worst.name}; steps would be {worst.gain:.1%} shorter were it average"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f} ms"
