"""The tests that need a GPU, in several processes at once: a part of `make gpu`.

Owns which files hold them (so that a test that needs what is not installed here is not even
imported), how they are shared among processes (most of their time is the compiler's, which
uses one core), and what becomes of their results. Run by benchmarks.gpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_records import Deadline, Recorder, parse_flags

ROOT: Final = Path(__file__).parent.parent
MAX_PROCESSES: Final = 6
KERNEL_TESTS: Final = Path("tests/kernels/triton")
"""Its conftest marks every test in it, where there is a GPU."""
QUICK_FILE: Final = KERNEL_TESTS / "test_runtime.py"
NOT_INSTALLED: Final = "ModuleNotFoundError"
NO_TESTS: Final = 5
"""pytest's exit status where nothing was chosen."""


def gpu_test_files(root: Path) -> list[Path]:
    """Give the files, relative to `root`, that hold tests for a GPU."""
    kernels = set((root / KERNEL_TESTS).glob("test_*.py"))
    marked = {
        path
        for path in (root / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    }
    return sorted(path.relative_to(root) for path in kernels | marked)


@dataclass
class Results:
    """What the processes reported together."""

    collected: int = 0
    outcomes: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    unread: dict[str, str] = field(default_factory=dict)
    """Files that could not be imported, and why."""
    lacking: dict[str, set[str]] = field(default_factory=dict)
    """Tests by the package whose lack, in their midst, ended them: they have not failed."""
    unfinished: list[str] = field(default_factory=list)
    """Tests that had begun when their process ended."""

    def count(self, outcome: str) -> int:
        """Count the tests that ended so."""
        return sum(found == outcome for found in self.outcomes.values())


def gather(reports: Iterable[str]) -> Results:
    """Add up the reports, each the text of a file that benchmarks.gpu_shard wrote.

    A last line that was cut off when a process was stopped is passed over.
    """
    results = Results()
    for text in reports:
        running: str | None = None
        for line in text.splitlines():
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            if "unread" in found:
                results.unread[found["unread"]] = found["why"]
            elif "collected" in found:
                results.collected += found["collected"]
            elif "started" in found:
                running = found["started"]
            else:
                test, running = found["ended"], None
                results.seconds += found["seconds"]
                if NOT_INSTALLED in found["why"]:
                    results.lacking.setdefault(found["why"], set()).add(test)
                    results.outcomes[test] = "skipped"
                    continue
                # A test that failed in its call and again afterwards has failed once.
                if results.outcomes.get(test) != "failed":
                    results.outcomes[test] = found["outcome"]
                if found["outcome"] == "failed":
                    results.failures.setdefault(test, found["why"])
        if running is not None:
            results.unfinished.append(running)
    return results


def report_results(results: Results, statuses: Sequence[int | None], recorder: Recorder) -> None:
    """Record the counts, every failure, and processes that ended badly (None: stopped)."""
    ended = len(results.outcomes)
    recorder.write(
        "figure",
        of="tests",
        collected=results.collected,
        passed=results.count("passed"),
        failed=results.count("failed"),
        skipped=results.count("skipped"),
        seconds=results.seconds,
    )
    for test, why in results.failures.items():
        recorder.problem(test, why)
    for file, why in results.unread.items():
        # What is not installed here was named before; the rest runs.
        record = recorder.skipped if NOT_INSTALLED in why else recorder.problem
        record(file, why)
    for why, tests in results.lacking.items():
        recorder.skipped(f"{len(tests)} tests", why)
    was_stopped = None in statuses
    if was_stopped:
        left = max(results.collected - ended, 0)
        running = ", ".join(results.unfinished) or "none"
        recorder.skipped(f"{left} tests", f"the time was up; running then: {running}")
    for status in statuses:
        if status not in (0, 1, NO_TESTS, None):
            running = ", ".join(results.unfinished) or "no test"
            recorder.problem("pytest", f"ended with status {status} during {running}")
    if ended == 0 and not was_stopped:
        recorder.problem("pytest", "no test was found")


def run_shards(
    files: Sequence[Path], marks: str, num_processes: int, deadline: Deadline, folder: Path
) -> tuple[list[str], list[int | None]]:
    """Run the files' tests in so many processes; give their reports and exit statuses.

    A process that outlasts the deadline is stopped, and its status is None.
    """
    paths = [folder / f"{idx}.jsonl" for idx in range(num_processes)]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu_shard"),
                *("-p", "no:cacheprovider", "-m", marks, "--tb=short"),
                # Versions are those of the machine, and what they warn of is no failure.
                *("--continue-on-collection-errors", "-W", "default"),
                *("--gpu-shard", f"{idx}/{num_processes}", "--gpu-report", str(path)),
                *map(str, files),
            ],
            cwd=ROOT,
            stdout=sys.stderr,
        )
        for idx, path in enumerate(paths)
    ]
    statuses: list[int | None] = []
    for process in processes:
        try:
            statuses.append(process.wait(timeout=max(deadline.left, 0.0)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            statuses.append(None)
    return [path.read_text(encoding="utf-8") for path in paths if path.exists()], statuses


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests; returns the exit status."""
    flags = parse_flags("benchmarks.gpu_tests", __doc__, argv)
    recorder, deadline = Recorder(), Deadline(flags.seconds)
    files = [QUICK_FILE] if flags.quick else gpu_test_files(ROOT)
    marks = "not slow" if flags.device == "cpu" else "gpu and not slow"
    cores = len(os.sched_getaffinity(0))
    num_processes = 1 if flags.quick else max(min(cores // 2, MAX_PROCESSES), 1)
    recorder.progress(f"{len(files)} files of tests in {num_processes} processes")
    with tempfile.TemporaryDirectory() as folder:
        reports, statuses = run_shards(files, marks, num_processes, deadline, Path(folder))
    report_results(gather(reports), statuses, recorder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
