"""A pytest plugin: one share of the tests, and a line of JSON per test as soon as it ends.

Owns two flags: --gpu-shard I/N keeps every N-th test of those that were chosen, from the I-th
on, so that N processes share kernels' compilation; --gpu-report FILE takes the lines, so that
what was found before a process was stopped is known. Loaded with `-p benchmarks.gpu_shard` by
benchmarks.gpu_tests alone.

Lines: {"unread": file, "why": text} for a file that cannot be imported, {"collected": n},
{"started": test}, and {"ended": test, "outcome": "passed" | "failed" | "skipped", "seconds": s,
"why": text}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WHY_LENGTH = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags."""
    parser.addoption("--gpu-shard", default="0/1", help="I/N: the I-th of N shares, from 0")
    parser.addoption("--gpu-report", type=Path, required=True, help="file for results")


def pytest_configure(config: pytest.Config) -> None:
    """Begin the report."""
    config.pluginmanager.register(_Shard(config), "gpu-shard")


def _reason(report: pytest.TestReport) -> str:
    """Give the first line of what a failure says."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else str(crash.message)
    return next(iter(text.strip().splitlines()), "")[:WHY_LENGTH]


class _Shard:
    """Chooses and reports."""

    def __init__(self, config: pytest.Config) -> None:
        number, _, count = config.getoption("--gpu-shard").partition("/")
        self._number, self._count = int(number), int(count)
        path: Path = config.getoption("--gpu-report")
        self._file = path.open("w", encoding="utf-8")

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep this process's share, after marks have chosen."""
        kept = items[self._number :: self._count]
        others = [item for idx, item in enumerate(items) if idx % self._count != self._number]
        items[:] = kept
        config.hook.pytest_deselected(items=others)
        self._write(collected=len(kept))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Report a file that cannot be imported."""
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            error = next((line for line in reversed(lines) if line.startswith("E ")), lines[-1])
            self._write(unread=report.nodeid, why=error.removeprefix("E ").strip()[:WHY_LENGTH])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say which test begins, should it never end."""
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report a test's call, and any other phase of it that failed or skipped it."""
        if report.when == "call" or not report.passed:
            self._write(
                ended=report.nodeid,
                outcome=report.outcome,
                seconds=report.duration,
                why=_reason(report) if report.failed else "",
            )

    def pytest_unconfigure(self) -> None:
        """End the report."""
        self._file.close()
