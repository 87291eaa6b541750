"""Cores, and the environment of node processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.app.launch.roles import ROOT
from topspin.cores import CORES_VARIABLE, node_environment, split_cores
from topspin.errors import ConfigError

HEAP = "GLIBC_TUNABLES"
CORES = str(len(os.sched_getaffinity(0)))


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
    assert split_cores(cores, num_nodes) == want


def test_a_split_with_too_few_cores_is_refused() -> None:
    with pytest.raises(ConfigError, match="--layout split: 3 nodes on 2 cores"):
        split_cores((0, 1), 3)


def test_nodes_that_take_turns_are_bound_and_one_that_computes_alone_is_not() -> None:
    alone = node_environment({})
    assert alone.pop(HEAP).startswith("glibc.malloc.hugetlb=1:")
    assert alone == {"OMP_NUM_THREADS": CORES, "GOMP_SPINCOUNT": "3000", CORES_VARIABLE: ""}
    bound = {"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"}
    assert node_environment({}, takes_turns=True, on_device=True) == alone | bound


def test_nodes_that_leave_cores_free_are_not_bound_to_the_same_ones() -> None:
    fewer = node_environment({}, num_threads=1000, takes_turns=True)
    assert fewer["OMP_NUM_THREADS"] == "1000"
    assert "OMP_PROC_BIND" not in fewer
    assert "OMP_PROC_BIND" not in node_environment({"OMP_NUM_THREADS": "1000"}, takes_turns=True)


def test_a_node_with_cores_of_its_own_has_no_more_threads() -> None:
    node = node_environment({}, cores=(4, 5), num_threads=8, spin_count=7)
    assert (node["OMP_NUM_THREADS"], node[CORES_VARIABLE]) == ("2", "4,5")
    assert node["GOMP_SPINCOUNT"] == "7"
    assert node_environment({}, cores=(4, 5))["OMP_NUM_THREADS"] == "2"


def test_what_the_user_has_set_stays_unless_a_setting_says_otherwise() -> None:
    user = {"OMP_NUM_THREADS": "5", "GOMP_SPINCOUNT": "0", HEAP: "glibc.malloc.arena_max=1"}
    assert node_environment(user) == {CORES_VARIABLE: ""}
    assert node_environment(user, num_threads=2)["OMP_NUM_THREADS"] == "2"


def asked_of_a_node(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment that a process has after settle_process(), and its cores."""
    code = (
        "import json, os, sys; from topspin.cores import settle_process; settle_process(); "
        "print(json.dumps({**os.environ, 'cores': str(sorted(os.sched_getaffinity(0))), "
        "'argument': sys.argv[1]}))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", code, "--index"],
        env={**kept, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_a_launched_node_moves_to_its_cores() -> None:
    first = min(os.sched_getaffinity(0))
    found = asked_of_a_node({CORES_VARIABLE: str(first)})
    assert found["cores"] == str([first])
    assert HEAP not in found


def test_a_node_that_nobody_launched_gives_itself_an_environment() -> None:
    found = asked_of_a_node({})
    assert found["cores"] == str(sorted(os.sched_getaffinity(0)))
    assert found[HEAP].startswith("glibc.malloc.hugetlb=1:")
    assert (found["OMP_NUM_THREADS"], found["argument"]) == (CORES, "--index")
