"""The layout: who gets which cores, and how `auto` chooses, remembers and explains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from m2n_comm.net import wait_policy
from tests.checkpoints import make_checkpoint
from tests.topspin.launch.roles import ROOT
from topspin.config import (
    ComputeSection,
    EngineConfig,
    M2NSection,
    ModelSection,
    TopologySection,
)
from topspin.cores import CORES_VARIABLE, assign_cores
from topspin.errors import ConfigError
from topspin.launch.calibrate import (
    CalibrationError,
    Candidate,
    calibrate,
    candidates,
    run_candidate,
)
from topspin.launch.engine import LaunchContext, role_commands
from topspin.resolve import resolve


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrate") / "tiny"
    make_checkpoint(path, "mixtral")
    return path


def config_of(path: Path, **m2n: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelSection(path=str(path), dtype="float32"),
        compute=ComputeSection(layout="auto"),
        m2n=M2NSection(**m2n),
    )


@pytest.mark.parametrize(
    ("num_nodes", "cores", "want"),
    [
        (2, (0, 1), [(0,), (1,)]),
        (2, (7, 1, 3, 5, 9), [(1, 3), (5, 7, 9)]),
        (3, (0, 1, 2, 3), [(0,), (1,), (2, 3)]),
    ],
)
def test_a_split_gives_every_core_to_one_node(
    num_nodes: int, cores: tuple[int, ...], want: list[tuple[int, ...]]
) -> None:
    got = assign_cores("split", num_nodes=num_nodes, cores=cores, num_threads=None)
    assert [node.cores for node in got] == want
    assert [node.num_threads for node in got] == [len(share) for share in want]


def test_a_split_with_too_few_cores_is_refused() -> None:
    with pytest.raises(ConfigError, match="--layout split: 3 nodes on 2 cores"):
        assign_cores("split", num_nodes=3, cores=(0, 1), num_threads=None)


def test_the_users_own_openmp_settings_stay() -> None:
    node = assign_cores("split", num_nodes=2, cores=(0, 1), num_threads=None)[1]
    assert node.environment({"OMP_NUM_THREADS": "5"}) == {
        CORES_VARIABLE: "1",
        "GOMP_SPINCOUNT": "3000",
    }


def test_auto_takes_the_fastest_says_why_and_remembers(checkpoint: Path, tmp_path: Path) -> None:
    times = {"local": 3.0, "shared": 2.0, "split": 1.0}
    lines: list[str] = []
    measured: list[str] = []

    def measure(config: EngineConfig, candidate: Candidate) -> float:
        name = candidate.transport if candidate.transport == "local" else candidate.layout
        measured.append(name)
        return times[name]

    def run() -> EngineConfig:
        return calibrate(
            config_of(checkpoint),
            emit=lines.append,
            measure=measure,
            cores=(0, 1),
            cache=tmp_path / "layouts.json",
        )

    first = run()
    assert (first.compute.layout, first.m2n.transport) == ("split", "shm")
    # Two spin counts each, but for the split's single threads.
    assert measured == ["local", "local", "shared", "shared", "split"]
    assert any("2.00 ms per trial step (2.00x)" in line for line in lines)
    assert "split cores over shm, 1+1 threads, spin, OpenMP spin count 3000 is taken" in lines[-1]
    assert run() == first
    assert len(measured) == 5
    assert "measured before" in lines[-1]


def test_within_the_margin_the_simpler_one_wins(checkpoint: Path, tmp_path: Path) -> None:
    chosen = calibrate(
        config_of(checkpoint),
        emit=lambda line: None,
        measure=lambda config, candidate: 1.02 if candidate.transport == "local" else 1.0,
        cores=(0, 1),
        cache=tmp_path / "layouts.json",
    )
    assert (chosen.compute.layout, chosen.m2n.transport) == ("shared", "local")


def test_a_candidate_that_fails_is_left_out(checkpoint: Path, tmp_path: Path) -> None:
    lines: list[str] = []

    def measure(config: EngineConfig, candidate: Candidate) -> float:
        if candidate.layout == "split":
            raise CalibrationError("it broke")
        return 5.0

    chosen = calibrate(
        config_of(checkpoint, transport="tcp"),
        emit=lines.append,
        measure=measure,
        cores=(0, 1),
        cache=tmp_path / "layouts.json",
    )
    assert (chosen.compute.layout, chosen.m2n.transport) == ("shared", "tcp")
    assert any("is out: it broke" in line for line in lines)


def test_only_what_fits_is_tried(checkpoint: Path) -> None:
    config = config_of(checkpoint)
    assert [(c.layout, c.transport) for c in candidates(config, (0,))] == [
        ("shared", "local"),
        ("shared", "shm"),
    ]
    two_cores = candidates(config_of(checkpoint, transport="tcp"), (0, 1))
    assert [(c.layout, c.transport) for c in two_cores] == [
        ("shared", "tcp"),
        ("shared", "tcp"),
        ("split", "tcp"),
    ]


def test_threads_and_spin_counts_are_tried_and_carried_out(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    config = config_of(checkpoint)
    tried = {
        (c.transport, c.layout, n.num_threads, n.spin_count)
        for c in candidates(config, range(8))
        for n in c.nodes
    }
    assert tried == {
        *(("local", "shared", threads, spin) for threads in (8, 4) for spin in (3000, 50_000)),
        *(("shm", "shared", threads, spin) for threads in (8, 4) for spin in (3000, 300)),
        *(("shm", "split", 4, spin) for spin in (3000, 50_000)),
    }

    def measure(config: EngineConfig, candidate: Candidate) -> float:
        node = candidate.nodes[0]
        is_best = (candidate.layout, node.num_threads, node.spin_count) == ("shared", 4, 300)
        return 1.0 if is_best else 2.0

    chosen = calibrate(
        config, emit=lambda line: None, measure=measure, cores=range(8), cache=tmp_path / "layouts"
    )
    assert (chosen.compute.num_threads, chosen.compute.spin_count) == (4, 300)
    context = LaunchContext(
        config=resolve(
            chosen, checkpoint_dtype="float32", max_position_embeddings=64, num_experts=4
        ),
        control="ipc://@x",
        config_fd=3,
        port_fd=4,
        dead_fd=5,
    )
    [expert] = [c for c in role_commands(context) if c.name == "expert 0"]
    assert expert.environment["OMP_NUM_THREADS"] == "4"
    assert expert.environment["GOMP_SPINCOUNT"] == "300"


def test_a_split_pins_nodes_and_lets_them_spin(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    config = resolve(
        EngineConfig(
            model=ModelSection(path=str(checkpoint)),
            topology=TopologySection(attention_nodes=1, expert_nodes=2),
            compute=ComputeSection(layout="split"),
        ),
        checkpoint_dtype="float32",
        max_position_embeddings=64,
        num_experts=4,
    )
    assert wait_policy(config.for_node()) == "spin"
    context = LaunchContext(config=config, control="ipc://@x", config_fd=3, port_fd=4, dead_fd=5)
    cores = {
        command.name: command.environment.get(CORES_VARIABLE) for command in role_commands(context)
    }
    assert cores == {
        "scheduler": None,
        "expert 0": "1",
        "expert 1": "2,3",
        "attention 0": "0",
        "gateway": None,
    }


def test_a_process_moves_to_its_cores() -> None:
    first = min(os.sched_getaffinity(0))
    code = (
        "import os; from topspin.cores import take_cores; take_cores(); "
        "print(os.sched_getaffinity(0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, CORES_VARIABLE: str(first)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str({first})


def test_a_real_candidate_is_timed(checkpoint: Path) -> None:
    config = config_of(checkpoint)
    tried = candidates(config, sorted(os.sched_getaffinity(0)))
    between = next(c for c in tried if c.transport == "shm")
    assert 0 < run_candidate(config, between) < 10_000


def test_a_candidate_that_cannot_run_says_why(tmp_path: Path) -> None:
    config = config_of(tmp_path / "nothing")
    node = tuple(assign_cores("shared", num_nodes=1, cores=(0,), num_threads=1))
    with pytest.raises(CalibrationError, match="exit status 1"):
        run_candidate(config, Candidate("shared", "local", node))
