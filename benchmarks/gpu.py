"""Everything that a GPU is to show, by one command of under 8 minutes: `make gpu`.

Checks what is installed, runs the tests for GPUs, times kernels against rooflines measured in
the same run, then decode and prefill end to end, and transformers on the same shape. Each
part is a process (benchmarks.gpu_parts) with its share of the time; what did not fit is
named. Prints a table and writes gpu-<device>-<date>.json. Run as

    python -m benchmarks.gpu [--only tests,rooflines,decode,transformers] [--output DIR]

--device cpu --quick --output DIR runs the same parts at tiny sizes by Triton's interpreter,
which shows that they work, and no speed. The exit status is 0 if every part ran to its end, no
test failed and every gate was reached; 1 if not; 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu_clocks import Clocks, ask_nvidia_smi, smi_name
from benchmarks.gpu_clocks import describe as describe_clocks
from benchmarks.gpu_display import Display, open_display
from benchmarks.gpu_parts import (
    TOTAL_SECONDS,
    Part,
    advice,
    choose_parts,
    find_missing,
    seconds_for,
)
from benchmarks.gpu_records import Deadline, Record
from benchmarks.gpu_report import ceilings, judge, tables
from benchmarks.gpu_run import Outcome, part_command, run_part

GRACE_S = 8.0
"""A part is told to end so much earlier than it is stopped."""
DEVICE_SECONDS = 60.0


def is_installed(package: str) -> bool:
    """Say whether a package could be imported."""
    return importlib.util.find_spec(package) is not None


def environment(device: str) -> dict[str, str]:
    """Give the environment of parts: kernels are interpreted exactly where there is no GPU."""
    found = dict(os.environ)
    found.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        found["TRITON_INTERPRET"] = "1"
    return found


class Session:
    """One run: the parts one after another, and what they gave."""

    def __init__(self, device: str, is_quick: bool, display: Display, logs: Path) -> None:
        self._device, self._is_quick = device, is_quick
        self._display, self._logs = display, logs
        self._environment = environment(device)
        self.outcomes: dict[str, Outcome] = {}

    def run(self, name: str, module: str, seconds: float) -> Outcome:
        """Run a module as a part of that name, and show what it says."""
        # What is stopped loses what it was at; what ends by itself says what it left out.
        soft = max(seconds - GRACE_S, seconds / 2)
        command = part_command(module, device=self._device, is_quick=self._is_quick, seconds=soft)

        def show(record: Record) -> None:
            self._display.record(name, record)

        outcome = run_part(
            command, self._environment, seconds, self._logs / f"gpu-{name}.log", show
        )
        self.outcomes[name] = outcome
        if outcome.status != 0:
            self._display.failed(name, outcome)
        return outcome


def complaints(name: str, outcome: Outcome) -> list[str]:
    """Say why a part is not good; [] if it is."""
    found = [f"{name}: {r['what']}: {r['why']}" for r in outcome.of_kind("problem")]
    if outcome.status is None:
        found.append(f"{name}: stopped after {outcome.seconds:.0f} s: its time was over")
    elif outcome.status != 0 and not found:
        found.append(f"{name}: ended with status {outcome.status}")
    return found


def result_of(
    device: Mapping[str, Any],
    outcomes: Mapping[str, Outcome],
    left_out: Mapping[str, str],
    clocks: Mapping[str, Any] | None,
    *,
    interpreted: bool,
    quick: bool,
) -> dict[str, Any]:
    """Put a run together as JSON; `left_out` names parts that did not run, and why."""
    figures = [
        {"part": name, **{k: v for k, v in record.items() if k != "kind"}}
        for name, outcome in outcomes.items()
        for record in outcome.of_kind("figure")
    ]
    return {
        "device": dict(device),
        "interpreted": interpreted,
        "quick": quick,
        "clocks": clocks,
        "seconds": sum(outcome.seconds for outcome in outcomes.values()),
        "parts": {
            **{
                name: {
                    "status": outcome.status,
                    "seconds": outcome.seconds,
                    "problems": complaints(name, outcome),
                    "skipped": [f"{r['what']}: {r['why']}" for r in outcome.of_kind("skipped")],
                    "tail": [] if outcome.is_good else outcome.tail,
                }
                for name, outcome in outcomes.items()
            },
            **{
                name: {"status": None, "seconds": 0.0, "problems": [], "skipped": [why], "tail": []}
                for name, why in left_out.items()
            },
        },
        "figures": figures,
        "verdicts": [{**asdict(verdict), "word": verdict.word} for verdict in judge(figures)],
    }


def failures(result: Mapping[str, Any]) -> list[str]:
    """Say why a run has failed: problems, parts that did not run, gates that were not reached."""
    found = [text for part in result["parts"].values() for text in part["problems"]]
    found += [
        f"{name}: not run: {'; '.join(part['skipped'])}"
        for name, part in result["parts"].items()
        if part["status"] is None and not part["problems"]
    ]
    below = (v["what"] for v in result["verdicts"] if v["word"] == "below the gate")
    return [*found, *(f"below its gate: {what}" for what in below)]


def file_name(device_name: str, date: datetime.date) -> str:
    """Name a result, without its ending."""
    device = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return f"gpu-{device}-{date.isoformat()}"


def find_left_out(parts: Sequence[Part]) -> dict[str, str]:
    """Give the parts that cannot run here, and why."""
    missing = find_missing(parts, is_installed)
    return {name: f"{m.package} is missing" for m in reversed(missing) for name in m.parts}


def run_parts(
    session: Session, parts: Sequence[Part], deadline: Deadline, save: Callable[[], object]
) -> None:
    """Run the parts in order; save after each, lest the whole command is stopped."""
    for idx, part in enumerate(parts):
        session.run(part.name, part.module, seconds_for(part, parts[idx + 1 :], deadline.left))
        save()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --quick")
    parser.add_argument("--only", help="names of parts, separated by commas")
    parser.add_argument("--output", type=Path, help="folder for the JSON (benchmarks/results)")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="of the whole run")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: no speeds")
    args = parser.parse_args(argv)
    if args.device == "cpu" and not args.quick:
        parser.error("--device cpu interprets kernels, at tiny sizes only: add --quick")
    if args.quick and args.output is None:
        parser.error("--quick holds no speeds, and is no result: say --output FOLDER")
    try:
        args.parts = choose_parts(args.only.split(",") if args.only else None)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the flags ask for; returns the exit status."""
    args = parse(argv)
    deadline = Deadline(args.seconds)
    missing = find_missing(args.parts, is_installed)
    if missing:
        print(advice(missing, platform.python_version()), file=sys.stderr)
    if not is_installed("torch"):
        print("make gpu: error: nothing runs without torch", file=sys.stderr)
        return 2
    gpu = smi_name(args.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    with (
        tempfile.TemporaryDirectory() as logs,
        open_display(args.seconds) as display,
        Clocks(partial(ask_nvidia_smi, gpu)) as clocks,
    ):
        session = Session(args.device, args.quick, display, Path(logs))
        about = session.run("device", "benchmarks.gpu_device", DEVICE_SECONDS)
        devices = about.of_kind("device")
        if not devices:
            reasons = [record["why"] for record in about.of_kind("problem")]
            for text in reasons or complaints("device", about):
                print(f"make gpu: error: {text}", file=sys.stderr)
            return 2
        del session.outcomes["device"]
        device = {name: value for name, value in devices[0].items() if name != "kind"}
        name = file_name(device["name"], datetime.datetime.now(datetime.UTC).date())
        left_out = find_left_out(args.parts)

        def save() -> tuple[dict[str, Any], Path]:
            result = result_of(
                device,
                session.outcomes,
                left_out,
                clocks.summary(),
                interpreted=args.device == "cpu",
                quick=args.quick,
            )
            return result, report.write(name, result, args.output or report.RESULTS)

        runnable = [part for part in args.parts if part.name not in left_out]
        run_parts(session, runnable, deadline, save)
    result, path = save()
    if args.quick:
        display.say("tiny sizes: the parts work, and the times above are no speeds")
    else:
        said = (ceilings(result["figures"]), describe_clocks(result["clocks"]))
        display.summary("; ".join(filter(None, said)), tables(result))
    found = failures(result)
    for text in found:
        print(f"make gpu: {text}", file=sys.stderr)
    print(path)
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
