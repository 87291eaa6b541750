"""The choice between running, recording and replaying a step, and the end of recordings."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels.recordings import Recordings
from kernels.runtime import HostRuntime, Replay


class Log(HostRuntime):
    """Records captures and replays; a body records that it ran."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def body(self, name: str) -> Callable[[], None]:
        return lambda: self.events.append(f"run {name}")

    def capture(self, body: Callable[[], None]) -> Replay:
        self.events.append("record")
        return lambda: self.events.append("replay")

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events


@pytest.fixture
def log() -> Log:
    return Log()


def test_the_first_is_run_the_second_recorded_and_the_others_replayed(log: Log) -> None:
    recordings: Recordings[int] = Recordings(log)
    taken = []
    for _ in range(3):
        recordings.run(1, log.body("a"), "state")
        taken.append(log.take())
    assert taken == [["run a"], ["record", "replay"], ["replay"]]
    recordings.run(2, log.body("b"), "state")
    assert log.take() == ["run b"]
    assert len(recordings) == 1


def test_in_another_state_the_first_is_run_again_since_its_kernels_may_be_others(log: Log) -> None:
    recordings: Recordings[int] = Recordings(log)
    for state in ("old", "old", "new", "new", "new", "old"):
        recordings.run(1, log.body("a"), state)
    again = ["run a", "record", "replay"]
    assert log.take() == [*again, *again, "replay", "run a"]
    recordings.run(1, log.body("a"), "old")
    assert len(recordings) == 1
    recordings.clear()
    assert len(recordings) == 0
    log.take()
    recordings.run(1, log.body("a"), "old")
    assert log.take() == ["run a"]


def test_the_recording_that_was_used_longest_ago_goes_for_a_new_one(log: Log) -> None:
    recordings: Recordings[str] = Recordings(log, limit=2)
    for key in ("a", "a", "b", "b", "a", "c", "c"):
        recordings.run(key, log.body(key), "state")
    assert len(recordings) == 2
    log.take()
    recordings.run("a", log.body("a"), "state")
    assert log.take() == ["replay"]
    recordings.run("b", log.body("b"), "state")
    assert log.take() == ["record", "replay"]
    assert len(recordings) == 2


def test_a_dropped_key_starts_again_and_others_stay(log: Log) -> None:
    recordings: Recordings[int] = Recordings(log)
    for key in (1, 2, 1, 2):
        recordings.run(key, log.body(str(key)), "state")
    log.take()
    recordings.drop(1)
    recordings.drop(7)
    for key in (1, 2, 1):
        recordings.run(key, log.body(str(key)), "state")
    assert log.take() == ["run 1", "replay", "record", "replay"]
