"""The start-up benchmark reads the phases from the engine's own log."""

from __future__ import annotations

import os

import pytest

from benchmarks.engine.startup import phases
from benchmarks.servers.topspin import descendants, pss_bytes

LINES = [
    "starting (0.0 s)",
    "gateway | INFO gateway: listens on 127.0.0.1 port 8150",
    "scheduler | INFO scheduler: attention 0 joined (pid 480)",
    "scheduler | INFO scheduler: expert 0 joined (pid 479)",
    "scheduler | INFO scheduler: expert 0 ready (1.3 s)",
    "scheduler | INFO scheduler: attention 0 ready (1.1 s)",
    "expert 0 | INFO expert 0 ready (generation 1, 1.3 s)",
    "Topspin is ready at http://127.0.0.1:8150 (model m, 1 attention + 1 expert nodes over shm)",
    "never read",
]


def test_a_phase_ends_with_the_last_process_that_says_it() -> None:
    ends, url = phases((float(at_s), line) for at_s, line in enumerate(LINES))
    assert url == "http://127.0.0.1:8150"
    assert ends == {
        "gateway listens": 1.0,
        "nodes imported": 3.0,
        "weights loaded and packed": 5.0,
        "ready": 7.0,
    }


def test_a_server_that_ends_before_it_is_ready_is_no_result() -> None:
    with pytest.raises(SystemExit, match="ended before it was ready"):
        phases((0.0, line) for line in LINES[:3])


def test_a_process_is_among_its_descendants_and_has_memory() -> None:
    assert os.getpid() in descendants(os.getpid())
    assert pss_bytes(os.getpid()) > 2**20
