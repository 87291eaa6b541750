"""Programs on teams: every op once and in order, on any number of threads, again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from kernels.cpu.compiled.program import Op, Program, Team
from kernels.cpu.compiled.rows import add_numbers, copy_rows

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
