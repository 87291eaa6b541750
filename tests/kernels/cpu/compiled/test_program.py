"""Programs on teams: every op once and in order, on any number of threads, again and again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.compiled.program import _LEFT, Op, Program, Team
from kernels.cpu.compiled.rows import add_numbers, copy_rows
from kernels.cpu.compiled.runtime import Kernel, offsets
from kernels.cpu.simd.lanes import read_i64, write_i64
from kernels.cpu.simd.tasks import leave_undone

COUNT = 20_000
NUM_OPS = 120


@pytest.fixture(params=[1, 2, 5])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    made = Team(request.param)
    yield made
    made.close()


def sums(total: torch.Tensor, term: torch.Tensor) -> list[Op]:
    """Return ops each of which reads what the one before has written, in several tasks."""
    there = (total.data_ptr(), 0, term.data_ptr(), 0, COUNT, 0)
    back = (term.data_ptr(), 0, total.data_ptr(), 0, COUNT, 0)
    return [Op(add_numbers, there if idx % 2 == 0 else back) for idx in range(NUM_OPS)]


def test_ops_run_in_order_and_each_task_once(team: Team) -> None:
    total, term = torch.zeros(COUNT), torch.zeros(COUNT)
    program = Program(sums(total, term), team)
    for start in range(1, 30):
        total.zero_()
        term.fill_(start / 2.0**100)
        program.run()
        a, b = 0.0, float(start)  # Fibonacci's numbers, exact up to a common power of two
        for idx in range(NUM_OPS):
            a, b = (a + b, b) if idx % 2 == 0 else (a, b + a)
        expected = torch.tensor([a, b], dtype=torch.float64) / 2.0**100
        found = torch.stack((total.double(), term.double()))
        torch.testing.assert_close(found, expected[:, None].expand(2, COUNT), rtol=1e-5, atol=0)
        assert (found == found[:, :1]).all(), "threads disagree about the order"


(WORDS,) = offsets(1)


@Kernel
def count_or_leave(block: int) -> None:
    """Count a call in the first of two words; the second says whether to leave it to Python."""
    words = read_i64(block + WORDS)
    write_i64(words, read_i64(words) + 1)
    if read_i64(words + 8):
        leave_undone(block)


def test_python_does_what_a_kernel_of_the_leader_leaves_undone(team: Team) -> None:
    total, term = torch.zeros(COUNT), torch.ones(COUNT)
    words = torch.zeros(2, dtype=torch.int64)
    seen = []

    def otherwise() -> None:
        seen.append(total.sum().item())
        if len(seen) % 4 == 0:  # long enough for the others to fall asleep
            until_s = time.monotonic() + 0.01
            while time.monotonic() < until_s:
                pass
        total.mul_(2)

    add = Op(add_numbers, (total.data_ptr(), 0, term.data_ptr(), 0, COUNT, 0))
    program = Program([add, Op(count_or_leave, (words.data_ptr(),), otherwise), add] * 3, team)
    times = program.take_times()
    for run in range(20):
        total.zero_()
        words[1] = run % 2
        program.run()
        assert words[0] == 3 * (run + 1), "once per run and op, by the leader alone"
        # x -> 2 (x + 1) + 1, or x -> x + 2
        assert (total == (21 if run % 2 else 6)).all()
        assert times.tolist() == sorted(times)
    assert seen == [COUNT * each for each in (1, 4, 10)] * 10


def test_an_error_of_python_ends_a_program_and_not_the_team(team: Team) -> None:
    total, term = torch.zeros(COUNT), torch.ones(COUNT)
    words = torch.tensor([0, 1])

    def fail() -> None:
        raise ValueError("no")

    add = Op(add_numbers, (total.data_ptr(), 0, term.data_ptr(), 0, COUNT, 0))
    failing = Program([add, Op(count_or_leave, (words.data_ptr(),), fail), add], team)
    other = Program([add, add], team)
    for run in range(10):
        total.zero_()
        with pytest.raises(ValueError, match="no"):
            failing.run()
        assert (total == 1).all(), run
        other.run()
        assert (total == 3).all(), run
        words[1] = 0
        failing.run()
        assert (total == 5).all(), run
        words[1] = 1


_FIND_CORES = """
import os, threading, time
from kernels.cpu.compiled.program import Team
team = Team(2)
(member,) = (each.native_id for each in threading.enumerate() if each.name == "team")
give_up_s = time.monotonic() + 20
while os.sched_getaffinity(member) & os.sched_getaffinity(0):  # it moves once it runs
    assert time.monotonic() < give_up_s, (os.sched_getaffinity(0), os.sched_getaffinity(member))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.slow
def test_members_are_not_on_the_core_that_openmp_gave_their_leader() -> None:
    """Also if OpenMP has not started its threads yet."""
    settings = {"OMP_NUM_THREADS": "2", "OMP_PROC_BIND": "close", "OMP_PLACES": "threads"}
    subprocess.run([sys.executable, "-c", _FIND_CORES], env=os.environ | settings, check=True)


def test_programs_of_a_team_take_turns(team: Team) -> None:
    table = torch.arange(64, dtype=torch.float32).view(8, 8)
    indices, first, second = torch.tensor([3, 1]), torch.zeros(2, 8), torch.zeros(2, 8)
    programs = [
        Program(
            [Op(copy_rows, (table.data_ptr(), 32, indices.data_ptr(), 2, out.data_ptr()))], team
        )
        for out in (first, second)
    ]
    for chosen in ([0, 7], [5, 5], [2, 6]):
        indices.copy_(torch.tensor(chosen))
        programs[0].run()
        assert torch.equal(first, table[chosen])
        assert not torch.equal(second, first)
        programs[1].run()
        assert torch.equal(second, first)


def test_the_times_of_ops_ascend() -> None:
    team = Team(2)
    total, term = torch.zeros(COUNT), torch.zeros(COUNT)
    program = Program(sums(total, term), team)
    times = program.take_times()
    before = time.monotonic_ns()
    program.run()
    found = [before, *times.tolist(), time.monotonic_ns()]
    assert found == sorted(found)
    assert len(times) == NUM_OPS
    team.close()


def test_who_changes_what_programs_read_waits_for_the_last_thread() -> None:
    """As if one had lost its core inside a program that is over."""
    team, found = Team(2), []
    num_left = team._words[_LEFT // 8 :]
    num_left[0] = 0
    began = threading.Event()

    def change() -> None:
        began.set()
        team.wait_until_left()
        found.append(int(num_left[0]))

    waiting = threading.Thread(target=change)
    waiting.start()
    assert began.wait(10)
    waiting.join(0.05)
    assert waiting.is_alive()
    num_left[0] = 1
    waiting.join(10)
    assert found == [1]
    team.close()


def test_a_teams_threads_end_with_it() -> None:
    before = set(threading.enumerate())
    team = Team(3)
    members = set(threading.enumerate()) - before
    assert len(members) == 2
    team.close()
    team.close()
    for member in members:
        member.join(10)
        assert not member.is_alive()
    other = Team(3)
    members = set(threading.enumerate()) - before
    del other
    for member in members:
        member.join(10)
        assert not member.is_alive()
