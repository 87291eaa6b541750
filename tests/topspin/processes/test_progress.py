"""A long step is reported regularly from within; a short or hung one never."""

from __future__ import annotations

from typing import Any

import pytest

from tests.m2n_comm.harness import make_ticket
from topspin.messages import Progress
from topspin.processes.progress import INTERVAL_S, StepProgress


class FakeControl:
    """Keeps the sent messages."""

    def __init__(self) -> None:
        self.sent: list[Progress] = []

    def send(self, message: Progress) -> None:
        self.sent.append(message)


class World:
    """A reporter on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("topspin.processes.progress.time.monotonic", lambda: self.now_s)
        self._control: Any = FakeControl()
        self.progress = StepProgress(self._control, role="expert", index=3)

    def states(self) -> list[str]:
        """Return the states reported since the last call."""
        sent, self._control.sent = self._control.sent, []
        assert all((m.role, m.index, m.generation) == ("expert", 3, 1) for m in sent)
        return [message.state for message in sent]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_one_message_per_interval_and_none_for_short_steps(world: World) -> None:
    for step in range(1, 50):  # long in all, each of them short
        world.progress.begin(make_ticket(step))
        world.now_s += INTERVAL_S * 0.9
        world.progress.beat()
    assert world.states() == []
    world.progress.begin(make_ticket(50))
    for _ in range(40):
        world.now_s += INTERVAL_S / 4
        world.progress.beat()
    assert world.states() == ["working"] * 10


def test_a_long_wait_is_told_and_taken_back_at_once(world: World) -> None:
    world.progress.begin(make_ticket(1))
    for _ in range(10):
        world.now_s += INTERVAL_S / 4
        world.progress.waiting()
    assert world.states() == ["waiting"] * 2
    world.progress.beat()
    assert world.states() == ["working"]
    for _ in range(20):  # each wait is short
        world.now_s += INTERVAL_S * 0.8
        world.progress.waiting()
        world.progress.beat()
    assert set(world.states()) == {"working"}


def test_an_end_is_told_once_and_only_if_nothing_follows(world: World) -> None:
    world.progress.idle()
    assert not world.progress.owes_end
    world.progress.begin(make_ticket(1))
    world.progress.end()
    assert world.progress.owes_end
    world.progress.idle()
    world.progress.begin(make_ticket(2))
    assert not world.progress.owes_end
    world.progress.end()
    for _ in range(20):
        world.now_s += INTERVAL_S / 4
        world.progress.waiting()  # outside of a step
        world.progress.idle()
    assert world.states() == ["done"]
    assert not world.progress.owes_end


def test_an_end_without_a_step_is_not_reported(world: World) -> None:
    """A node that is taken in late leaves the generation before, in which it had no step."""
    world.progress.end()
    world.now_s += 2 * INTERVAL_S
    assert not world.progress.owes_end
    world.progress.idle()
    assert world.states() == []
