"""The check that a machine with a GPU can run Topspin, and that kernels are correct on it.

The first part of `make gpu`. Prints a line for each requirement of Triton and Topspin (compiler,
Python.h, driver, torch, triton, packages), naming missing ones; then runs the tests of tests/gpu
(one per kernel at the tiles and shapes of real use, a tiny draft model, and both sides of M2N at
once on two streams) and cuda_ipc between two processes. Imports no package that may be missing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kernels.triton.toolchain import find_compiler, find_header

if TYPE_CHECKING:
    from benchmarks.gpu.part import Part

ROOT: Final = Path(__file__).parents[2]
KERNELS: Final = ("tests/gpu/test_kernels.py", "tests/gpu/test_draft_model.py")
"""Many kernels, each compiled once: in processes of their own at the same time."""
TIMED: Final = ("tests/gpu/test_m2n_stress.py", "tests/m2n_comm/test_processes.py")
"""One after another, with nothing beside them."""
MOST_PROCESSES: Final = 8
QUICK: Final = ("tests/gpu/test_kernels.py", "-k", "norm and 1")
SECONDS: Final = 170.0
PACKAGES: Final = {
    "numpy": "sampling",
    "msgspec": "configuration and plans",
    "pytest": "these tests",
    "numba": "cuda_ipc between processes",
    "zmq": "cuda_ipc between processes",
}
"""The packages that the parts of `make gpu` import, and their purposes."""


class ProbeFact(NamedTuple):
    """One line of the probe."""

    what: str
    found: str | None
    advice: str
    """How to install it, if it is missing."""


def installed(package: str) -> str | None:
    """Return a package's version; None if it is not installed, or cannot be imported."""
    # In a process of its own: one that is broken may end it, and what it imports stays there.
    command = [sys.executable, "-c", f"import {package}"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return None
    try:
        return importlib.metadata.version({"zmq": "pyzmq"}.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def driver() -> str | None:
    """Return the GPUs and their driver's version from nvidia-smi."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi does not answer: {error}"
    return "; ".join(asked.stdout.strip().splitlines()) or None


def facts(*, needs_gpu: bool) -> Iterator[ProbeFact]:
    """Yield the lines of the probe."""
    compiler, header = find_compiler(), find_header()
    yield ProbeFact("python", f"{platform.python_version()}, {sys.executable}", "")
    yield ProbeFact(
        "C compiler", compiler, "install gcc or clang, or set CC: Triton builds with it"
    )
    yield ProbeFact(
        "Python.h",
        None if header is None else str(header),
        f"install the headers of Python {'.'.join(platform.python_version_tuple()[:2])} "
        "(python3-dev): Triton builds with them",
    )
    if needs_gpu:
        yield ProbeFact("driver", driver(), "no nvidia-smi on PATH: install the NVIDIA driver")
    for package in ("torch", "triton"):
        yield ProbeFact(
            package, installed(package), "install a build of torch for GPUs, with triton"
        )
    for package, purpose in PACKAGES.items():
        yield ProbeFact(package, installed(package), f"pip install it: for {purpose}")


def run_tests(arguments: Sequence[str], environment: dict[str, str], limit_s: float) -> str | None:
    """Run pytest and return its JUnit report; None if it had to be stopped or left none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--durations=15"]
        # A package that is missing costs the tests that import it, and no others.
        command.append("--continue-on-collection-errors")
        # The newer family of reports has no properties of a test.
        command += ["-o", "junit_family=xunit1"]
        # The machine has its own versions, whose warnings are not failures.
        command += ["-p", "no:cacheprovider", "-W", "default", f"--junitxml={report}"]
        # In a new session, so that its compilers and processes are stopped with it.
        process = subprocess.Popen(
            [*command, *arguments], cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            process.wait(timeout=max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return report.read_text(encoding="utf-8") if report.exists() else None


class Outcome(NamedTuple):
    """The result of one test."""

    test: str
    outcome: str
    """passed, skipped, failed, or error."""
    seconds: float
    why: str
    properties: dict[str, str]
    """The properties recorded by the test (record_property)."""


def read_outcomes(report: str) -> list[Outcome]:
    """Return the tests of a JUnit report."""
    found = []
    for case in ET.fromstring(report).iter("testcase"):
        outcome, why = "passed", ""
        for kind, word in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
            each = case.find(kind)
            if each is not None:
                outcome, why = word, each.get("message", "")
                break
        properties = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        name = f"{case.get('classname')}::{case.get('name')}"
        found.append(Outcome(name, outcome, float(case.get("time", 0)), why, properties))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Probe and test; returns the exit status."""
    if installed("torch") is None or installed("numpy") is None:
        for fact in facts(needs_gpu=True):
            print(f"{fact.what:12} {fact.found or 'MISSING: ' + fact.advice}")
        return 2
    import torch

    from benchmarks.gpu.part import Part, parse, parser

    args = parse(parser("smoke", SECONDS), argv)
    on_gpu = args.device != "cpu"
    has_gpu = on_gpu and torch.cuda.is_available()
    part = Part("smoke", args, torch.cuda.get_device_name() if has_gpu else "cpu")
    for fact in facts(needs_gpu=on_gpu):
        said = fact.found or f"MISSING: {fact.advice}"
        part.figure(f"{fact.what:12} {said}", probe=fact.what, found=fact.found)
        if fact.found is None:
            part.problem(fact.what, said)
    if on_gpu and not has_gpu:
        part.problem("torch", f"{torch.__version__} sees no GPU (built for {torch.version.cuda})")
        return part.finish()
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if not on_gpu:
        environment["TRITON_INTERPRET"] = "1"
    chosen = ["-m", "gpu" if on_gpu else "not slow"]
    at_once = []
    if installed("xdist") is not None:
        at_once = ["-n", str(min(MOST_PROCESSES, os.cpu_count() or 1))]
    for tests in [QUICK] if args.quick else [(*KERNELS, *at_once), TIMED]:
        report = run_tests([*tests, *chosen], environment, part.left_s)
        show(part, " ".join(tests), None if report is None else read_outcomes(report))
    return part.finish()


def show(part: Part, tests: str, outcomes: Sequence[Outcome] | None) -> None:
    """Keep the outcomes of `tests`, and print them with their properties; None: not ended."""
    if outcomes is None:
        part.problem(tests, "did not come to their end")
        return
    for each in outcomes:
        said = ", ".join(f"{name} {value}" for name, value in each.properties.items())
        line = f"{each.outcome:8} {each.seconds:6.1f} s  {each.test}  {said}".rstrip()
        part.figure(line, **each._asdict())
        if each.outcome in ("failed", "error"):
            part.problem(each.test, each.why)
    if not any(each.outcome == "passed" for each in outcomes):
        part.problem(tests, "no test passed")


if __name__ == "__main__":
    raise SystemExit(main())
