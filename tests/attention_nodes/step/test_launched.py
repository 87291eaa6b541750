"""The timings of a step on a device that is busy while the host prepares."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from attention_nodes.sampling.sampler import Drawn
from attention_nodes.step.launched import LaunchedStep
from m2n_comm.net import NetTimes
from tests.attention_nodes.plans import step_ticket
from topspin.errors import DeadlineExceeded
from topspin.messages import StepTimings


class At(NamedTuple):
    """An event at a known time; is_done() is true from the third call on."""

    time_s: float
    looks: list[int]

    def is_done(self) -> bool:
        self.looks.append(1)
        return len(self.looks) > 2

    def seconds_since(self, earlier: Any) -> float:
        return self.time_s - float(earlier.time_s)


class Receipt(NamedTuple):
    ended: At

    def arrays(self) -> list[np.ndarray]:
        return [np.array([5])]


def step(*, wait_s: float = 0.0, check: Any = None) -> LaunchedStep:
    """Host: began at 10, enqueued from 12; device: began at 13, rallied at 17, ended at 18."""
    unused: Any = None
    return LaunchedStep(
        ticket=step_ticket(4, generation=2, participants=(1,)),
        index=1,
        asked=unused,
        reserved=unused,
        receipt=Receipt(At(18.0, [])),
        started_s=10.0,
        prepared_s=12.0,
        began=At(13.0, []),
        rallied=At(17.0, []),
        times=NetTimes(wait_s, 0.5, 0.25),
        check=check,
    )


def timings(*, previous_s: float | None, wait_s: float = 0.0) -> StepTimings:
    result = step(wait_s=wait_s).result(Drawn(b"", b"", b"", {}, {}, {}), previous_s=previous_s)
    assert (result.step, result.generation, result.index) == (4, 2, 1)
    return result.timings


def test_an_idle_device_waits_for_what_the_host_prepares() -> None:
    found = timings(previous_s=9.5, wait_s=1.0)
    assert (found.prepare_s, found.attention_s, found.wait_s) == (2.0, 3.0, 1.0)
    assert (found.sample_s, found.total_s, found.gap_s) == (1.0, 7.0, 0.5)
    assert (found.expert_s, found.link_s) == (0.5, 0.25)


@pytest.mark.parametrize(("previous_s", "prepare_s"), [(11.5, 0.5), (12.5, 0.0)])
def test_what_was_prepared_while_the_device_was_busy_costs_nothing(
    previous_s: float, prepare_s: float
) -> None:
    found = timings(previous_s=previous_s)
    assert (found.prepare_s, found.gap_s) == (prepare_s, 0.0)
    assert found.total_s == prepare_s + 5.0


def test_the_first_step_has_no_gap() -> None:
    assert timings(previous_s=None).gap_s == 0.0


def test_a_net_is_checked_while_a_step_runs_and_when_it_has_ended() -> None:
    checks: list[int] = []
    assert step(check=lambda: checks.append(1)).wait()[0].tolist() == [5]
    assert len(checks) == 3


def test_what_a_check_finds_is_raised_instead_of_an_answer() -> None:
    def check() -> None:
        raise DeadlineExceeded("expert 0 is late")

    with pytest.raises(DeadlineExceeded, match="expert 0"):
        step(check=check).wait()
