"""The measurement of the client's own limits at a small size: every event comes and is counted."""

from __future__ import annotations

import resource

from benchmarks.load import capacity
from benchmarks.load.files import SPARE_FILES, allow_open_files


def test_all_events_of_all_streams_come() -> None:
    row = capacity.measure(20, 0.01, 0.05)
    assert row["failed"] == 0
    assert row["streams"] == 20
    assert 1 <= row["peak_streams"] <= 20
    assert row["events_per_s"] > 0
    assert row["cpu_us_per_event"] > 0


def test_the_server_paces_its_events() -> None:
    with capacity.flood(0.02) as url:
        run = capacity.run_load(
            capacity.Target(url, "flood"),
            [capacity.BenchRequest(max_tokens=5, prompt="a")] * 2,
            capacity.Load(max_concurrency=1),
        )
    for record in run.records:
        assert record.ok
        assert (record.output_tokens, record.text) == (5, " word" * 5)
        assert (record.end_s or 0) - (record.sent_s or 0) >= 5 * 0.02 - 0.002


def test_the_limit_of_open_files_only_grows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        allow_open_files(600)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600 + SPARE_FILES, hard)
        allow_open_files(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600 + SPARE_FILES, hard)
        if hard != resource.RLIM_INFINITY:
            allow_open_files(hard)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
