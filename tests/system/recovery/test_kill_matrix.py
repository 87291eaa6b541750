"""Every role x every fault x every phase x every layout of one host: nothing lost, nothing wrong.

Owns the matrix and the choice of cases such that each pair of values occurs (all of them with
TOPSPIN_ALL_FAULTS=1). One engine per layout, whole again between faults. A gateway's streams are
lost with it, and its clients ask again for the rest. test_hosts.py has several hosts, whose links
can be cut; a hang of a scheduler or gateway is noticed by probes of pods, not on one host.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.engine import engine_config
from tests.identity.layouts.test_stages import staged
from tests.system.conftest import Tiny, make_tiny
from tests.system.recovery.test_chaos import RESTLESS
from tests.system.rig.chaos import Streams, check_identical, wait_until, wait_until_whole
from tests.system.rig.chaos_node import HANG
from tests.system.rig.retrying import RetryingStreams
from tests.system.rig.server import Server, Settings
from tests.system.test_speculation import FLAGS, TREES

NUM_TOKENS = 60
MIN_MARGIN = 5e-4
PAUSE_S = 4.0
SETTINGS: Settings = {"latency_us": 5000, "deadline_s": 5}
MODULE = "tests.system.rig.chaos_serve"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "1x1": ("gateway", "scheduler", "attention 0", "expert 0"),
    "2x2, experts move": ("gateway", "scheduler", "attention 0", "expert 1"),
    "a draft node": ("draft 0", "attention 0"),
    "stages": ("stage 0", "stage 1"),
}
FAULTS = ("killed", "frozen", "hangs")
PHASES = ("idle", "prefill", "decode")


class Case(NamedTuple):
    """A fault of a process."""

    layout: str
    role: str
    fault: str
    phase: str

    def __str__(self) -> str:
        return f"{self.layout}: {self.role} {self.fault}, {self.phase}"


def all_cases() -> list[Case]:
    """Return every case that can be."""
    found = [
        Case(layout, role, fault, phase)
        for layout, roles in LAYOUTS.items()
        for role, fault, phase in itertools.product(roles, FAULTS, PHASES)
    ]
    return [each for each in found if each.fault != "hangs" or " " in each.role]


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Return cases in which every pair of values occurs that occurs in all, chosen greedily."""

    def pairs(case: Case) -> set[tuple[str, str]]:
        return {*itertools.combinations(case, 2)}

    missing, chosen = set[tuple[str, str]]().union(*map(pairs, cases)), list[Case]()
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return sorted(chosen, key=cases.index)


CASES = all_cases() if os.environ.get("TOPSPIN_ALL_FAULTS") else pairwise(all_cases())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    prompts = [[(7 * i + 31 * n) % 250 for i in range(5 + 9 * n)] for n in range(7)]
    prompts.append([(7 * i) % 250 for i in range(150)])
    directory = tmp_path_factory.mktemp("matrix")
    return make_tiny(directory, "qwen2_moe", prompts, NUM_TOKENS, margin=MIN_MARGIN)


class Servers:
    """The engine of one layout at a time."""

    def __init__(self, model: Tiny, directory: Path) -> None:
        self._model, self._directory = model, directory
        self._layout = ""
        self._open = contextlib.ExitStack()

    def of(self, layout: str) -> Server:
        """Return the engine of `layout`, started if another one was there."""
        if layout != self._layout:
            self.close()
            self._layout = layout
            self.server = self._open.enter_context(self._start(layout))
        return self.server

    def _start(self, layout: str) -> Server:
        path, directory = self._model.path, self._directory
        if layout == "stages":
            plan = engine_config(
                path, transport="shm", expert_nodes=2, latency_us=2000.0, restart=True
            )
            return Server(path, directory, plan=staged(plan, 1, 3, 4), module=MODULE)
        if layout == "a draft node":
            flags = (*FLAGS, "--draft-nodes", "1", "--speculative-config", TREES % path)
            return Server(path, directory, *flags, module=MODULE, settings=SETTINGS)
        if layout == "1x1":
            return Server(path, directory, module=MODULE, settings=SETTINGS)
        flags = ("--attention-nodes", "2", "--expert-nodes", "2")
        return Server(path, directory, *flags, module=MODULE, settings={**SETTINGS, **RESTLESS})

    def close(self) -> None:
        """Stop the engine."""
        self._open.close()
        self._layout = ""


@pytest.fixture(scope="module")
def servers(model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    found = Servers(model, tmp_path_factory.mktemp("servers"))
    yield found
    found.close()


def happens(server: Server, case: Case) -> None:
    """Let the fault happen; a frozen process goes on when it has been taken for dead, or later."""
    pid, seen = server.pids[case.role], len(server.output)
    if case.fault == "killed":
        os.kill(pid, signal.SIGKILL)
    elif case.fault == "hangs":
        os.kill(pid, HANG)
    else:
        os.kill(pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + PAUSE_S
        while f"lost {case.role}" not in server.output[seen:] and time.monotonic() < deadline_s:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairs_of_faults(
    servers: Servers, model: Tiny, case: Case, record_property: pytest.RecordProperty
) -> None:
    server = servers.of(case.layout)
    wait_until_whole(server)
    # An engine is whole without its draft node, which may still be on its way back.
    wait_until(lambda: case.role in server.pids_by_role(), "not there")
    server.pids = server.pids_by_role()
    before = server.pids[case.role]
    if case.phase == "idle":
        happens(server, case)
        streams = RetryingStreams(server.url, model.prompts, NUM_TOKENS)
    else:
        streams = RetryingStreams(server.url, model.prompts, NUM_TOKENS)
        if case.phase == "decode":
            streams.wait_for_events(30)
        else:
            wait_until(lambda: "recovering" not in server.output[-200:], "not whole")
        happens(server, case)
    check_identical(streams.join(), model.tokens)
    if case.role != "gateway":
        assert streams.num_retries == 0
        if case.phase == "decode":
            record_property("figure", f"{case}: {streams.longest_gap_s:.1f} s")
    if case.fault == "killed":
        wait_until(lambda: server.pids_by_role().get(case.role, before) != before, "not back")
    wait_until_whole(server)
    check_identical(Streams(server.url, model.prompts, NUM_TOKENS).join(), model.tokens)
    server.pids = server.pids_by_role()


def test_every_pair_of_values_is_tried() -> None:
    every, chosen = all_cases(), pairwise(all_cases())
    for first, second in itertools.combinations(range(len(Case._fields)), 2):
        wanted = {(case[first], case[second]) for case in every}
        assert {(case[first], case[second]) for case in chosen} == wanted
    assert len(chosen) < len(every) / 2
