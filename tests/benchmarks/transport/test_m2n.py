"""The M2N benchmark measures every backend, and its ratios have the stated meaning."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from app.cli.main import main
from benchmarks.transport import m2n


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "backends"),
    [
        ("1x1", ("shm", "tcp keys", "local", "gloo", "zmq ipc")),
        ("1x1", m2n.OURS + m2n.BASELINES),
        ("2x2", ("shm", "tcp", "gloo", "zmq ipc")),
    ],
)
def test_the_command_plays_every_backend_on_both_sides_and_writes_what_it_measured(
    topology: str,
    backends: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(m2n, "TRIPS", 8)
    monkeypatch.setattr(m2n, "ROUND_BYTES", 4096)
    num_nodes = sum(int(part) for part in topology.split("x"))
    flags = ["--topologies", topology, "--sizes", "8192", "--rounds", "1", "--backends", *backends]
    flags += ["--result-dir", str(tmp_path)]
    assert main(["bench", "m2n", *flags]) == 0
    written = json.loads((tmp_path / "m2n.json").read_text())
    assert [row["backend"] for row in written["rows"]] == m2n.backends_of(
        num_nodes // 2, num_nodes // 2, backends
    )
    for row in written["rows"]:
        assert row["topology"] == topology
        assert row["message_bytes"] == 8192
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["gb_per_s"] > 0
    assert written["machine"]["cores"] >= 1
    assert "p50" in capsys.readouterr().out


def test_backends_that_a_topology_has_no_room_for_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    wanted = ("shm spin", "shm", "local", "gloo")
    assert m2n.backends_of(1, 1, wanted) == ["shm spin", "shm", "local", "gloo"]
    assert m2n.backends_of(2, 2, wanted) == ["shm", "gloo"]


def test_ratios_are_how_many_times_better_ours_is() -> None:
    names = ("topology", "backend", "message_bytes", "p50_us", "gb_per_s")
    rows = (
        ("1x1", "gloo", 65536, 100.0, 1.0),
        ("1x1", "shm spin", 65536, 20.0, 2.0),
        ("1x1", "tcp", 65536, 50.0, 2.0),
        ("1x1", "gloo", 262144, 100.0, 1.5),
        ("1x1", "shm spin", 262144, 20.0, 6.0),
    )
    assert m2n.ratios([dict(zip(names, row, strict=True)) for row in rows]) == {
        "gloo p50 / shm spin p50 at 64 KB": 5.0,
        "shm spin / gloo throughput at 256 KB": 4.0,
        "gloo p50 / tcp p50 at 64 KB": 2.0,
    }
