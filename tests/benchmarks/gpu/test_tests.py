"""The tests' part: which files it runs, how they are shared, and what becomes of results."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_records import Recorder
from benchmarks.gpu_tests import QUICK_FILE, Results, gather, gpu_test_files, report_results

ROOT = Path(__file__).parents[3]

SAMPLE = """
import pytest

@pytest.mark.parametrize("number", range(5))
def test_number(number):
    assert number != 3, "three"

@pytest.mark.slow
def test_slow():
    raise AssertionError

@pytest.fixture
def broken():
    yield
    raise ValueError("left open")

def test_leaves_something_open(broken):
    pass

def test_is_skipped():
    pytest.skip("no need")
"""


def lines(*found: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in found)


def ended(test: str, outcome: str, why: str = "") -> dict[str, Any]:
    return {"ended": test, "outcome": outcome, "seconds": 1.0, "why": why}


def test_reports_add_up() -> None:
    first = lines(
        {"collected": 3},
        {"started": "a"},
        ended("a", "passed"),
        {"started": "b"},
        ended("b", "failed", "no"),
        ended("b", "failed", "and again"),
        {"started": "c"},
    )
    second = lines({"collected": 2}, {"started": "d"}, ended("d", "passed"), ended("d", "failed"))
    found = gather([first + '{"ended": "c", "outc', second])
    assert found.collected == 5
    assert found.outcomes == {"a": "passed", "b": "failed", "d": "failed"}
    assert found.failures == {"b": "no", "d": ""}
    assert found.unfinished == ["c"]
    assert found.count("failed") == 2


def recorded(results: Results, statuses: list[int | None]) -> list[dict[str, Any]]:
    stream = io.StringIO()
    report_results(results, statuses, Recorder(stream))
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_test_that_lacks_a_package_has_not_failed() -> None:
    why = "ModuleNotFoundError: No module named 'numba'"
    report = lines(
        {"collected": 2}, ended("a", "failed", why), ended("b", "failed", why), ended("c", "passed")
    )
    results = gather([report])
    assert results.failures == {}
    figure, skipped = recorded(results, [1])
    assert (figure["passed"], figure["failed"], figure["skipped"]) == (1, 0, 2)
    assert skipped == {"kind": "skipped", "what": "2 tests", "why": why}


def test_failures_are_problems_and_the_rest_is_counted() -> None:
    results = Results(3, {"a": "passed", "b": "failed"}, {"b": "no"}, 2.0)
    figure, problem = recorded(results, [1])
    assert recorded(Results(unread={"a.py": "SyntaxError"}), [None])[1]["kind"] == "problem"
    missing = {"a.py": "ModuleNotFoundError: No module named 'numba'"}
    assert recorded(Results(unread=missing), [None])[1] == {
        "kind": "skipped",
        "what": "a.py",
        "why": missing["a.py"],
    }
    assert (figure["collected"], figure["passed"], figure["failed"]) == (3, 1, 1)
    assert problem == {"kind": "problem", "what": "b", "why": "no"}


def test_what_the_time_did_not_suffice_for_is_counted() -> None:
    results = Results(9, {"a": "passed"}, unfinished=["b"])
    _, skipped = recorded(results, [0, None])
    assert skipped["what"] == "8 tests"
    assert "running then: b" in skipped["why"]


def test_a_process_that_crashed_is_a_problem() -> None:
    results = Results(9, {"a": "passed"}, unfinished=["b"])
    _, problem = recorded(results, [-11])
    assert problem["why"] == "ended with status -11 during b"
    # A process may have no share of few tests; none at all is a mistake.
    assert len(recorded(Results(1, {"a": "passed"}), [0, 5])) == 1
    assert recorded(Results(), [5])[1]["why"] == "no test was found"


def test_kernels_and_marked_tests_are_found() -> None:
    files = gpu_test_files(ROOT)
    assert QUICK_FILE in files
    assert files == sorted(set(files))
    assert all((ROOT / file).is_file() for file in files)


def test_other_files_are_not_even_looked_into_by_pytest(tmp_path: Path) -> None:
    kernels = tmp_path / "tests/kernels/triton"
    kernels.mkdir(parents=True)
    for name, text in (("kernels/triton/test_a", ""), ("test_b", ""), ("test_c", "import x")):
        (tmp_path / f"tests/{name}.py").write_text(text)
    (tmp_path / "tests/test_b.py").write_text("pytestmark = pytest.mark." + "gpu")
    found = [str(file) for file in gpu_test_files(tmp_path)]
    assert found == ["tests/kernels/triton/test_a.py", "tests/test_b.py"]


def test_shards_share_the_tests_and_report_each(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "test_unread.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: long\n")
    reports, statuses = [], []
    for idx in range(2):
        path = tmp_path / f"{idx}.jsonl"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu_shard"),
                *("-p", "no:cacheprovider", "-m", "not slow", "--rootdir", str(tmp_path)),
                *(
                    "--gpu-shard",
                    f"{idx}/2",
                    "--gpu-report",
                    str(path),
                    "--continue-on-collection-errors",
                ),
                *("test_sample.py", "test_unread.py"),
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        statuses.append(done.returncode)
        reports.append(path.read_text())
    assert statuses == [1, 1]
    assert all(gather([report]).collected in (3, 4) for report in reports)
    found = gather(reports)
    assert found.collected == len(found.outcomes) == 7
    assert found.count("passed") == 4
    assert found.count("skipped") == 1
    assert {test.split("::")[1]: why for test, why in found.failures.items()} == {
        "test_number[3]": "AssertionError: three",
        "test_leaves_something_open": "ValueError: left open",
    }
    assert found.unfinished == []
    assert found.unread == {
        "test_unread.py": "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"
    }
