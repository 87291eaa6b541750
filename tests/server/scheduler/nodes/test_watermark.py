"""The node that is declared dead, and the time, on a simulated clock: the limits are exact."""

from __future__ import annotations

import pytest

from server.scheduler.nodes.roster import Member
from server.scheduler.nodes.watermark import MAX_GAP_S, Verdict, Watermark
from server.scheduler.planning.in_flight import StepUnderWay
from topspin.messages import Progress, ProgressState

A0, E0, E1 = Member("attention", 0), Member("expert", 0), Member("expert", 1)
EXPERTS = [E0, E1]
STEP = 7
TICK_S = 0.25
SILENT_S = 5.0
STANDSTILL_S = 1.0


class World:
    """A watermark that is asked at every tick, as in the scheduler's loop."""

    def __init__(self, *, standstill_limit_s: float | None = STANDSTILL_S) -> None:
        self.watermark = Watermark(silent_limit_s=SILENT_S, standstill_limit_s=standstill_limit_s)
        self.now = 100.0
        self.head: StepUnderWay | None = StepUnderWay(STEP, self.now, [0])

    def say(self, member: Member, state: ProgressState, *, step: int = STEP) -> None:
        message = Progress(
            step=step, generation=1, role=member.role, index=member.index, state=state
        )
        self.watermark.heard(message, self.now)

    def run(self, duration_s: float, **states: ProgressState) -> Verdict | None:
        """Let time pass with the same reports at every tick; return the first verdict."""
        for _ in range(round(duration_s / TICK_S)):
            self.now += TICK_S
            for name, state in states.items():
                self.say({"a0": A0, "e0": E0, "e1": E1}[name], state)
            verdict = self.watermark.judge(self.head, EXPERTS, self.now)
            if verdict is not None:
                return verdict
        return None


def test_the_one_that_says_nothing_is_dead_after_the_limit_and_a_tick() -> None:
    world = World()
    verdict = world.run(60.0, a0="waiting", e0="done")
    assert verdict is not None
    assert verdict.member == E1
    assert verdict.silent_s == SILENT_S + TICK_S
    assert world.now == 100.0 + SILENT_S + TICK_S
    assert "step 7" in verdict.reason
    assert "failover.progress_deadline_s 5" in verdict.reason


@pytest.mark.parametrize("state", ["working", "waiting"])
def test_an_attention_node_is_watched_until_it_has_answered(state: ProgressState) -> None:
    world = World()
    verdict = world.run(60.0, e0=state, e1="working")
    assert verdict is not None
    assert verdict.member == A0
    answered = World()
    answered.head = StepUnderWay(STEP, 100.0, [])
    assert answered.run(60.0, e0="working", e1="working") is None


def test_a_step_may_take_any_time_while_its_nodes_speak() -> None:
    world = World()
    assert world.run(600.0, a0="waiting", e0="working", e1="waiting") is None
    assert world.run(600.0, a0="working", e0="done", e1="done") is None


def test_silence_is_counted_from_the_step_before_s_end() -> None:
    world = World()
    assert world.run(SILENT_S - TICK_S) is None
    world.head = StepUnderWay(STEP + 1, world.now, [0])
    assert world.run(SILENT_S) is None
    assert world.run(TICK_S) is not None


def test_a_node_that_is_a_step_ahead_has_done_its_part() -> None:
    world = World()
    world.say(E0, "waiting", step=STEP + 1)
    assert world.run(60.0, a0="working", e1="working") is None


def test_all_that_wait_for_one_another_have_lost_something() -> None:
    world = World()
    verdict = world.run(60.0, a0="waiting", e0="waiting", e1="done")
    assert verdict is not None
    assert verdict.member is None
    assert verdict.silent_s == STANDSTILL_S + TICK_S
    assert "wait for one another" in verdict.reason


def test_one_that_works_in_between_starts_the_standstill_anew() -> None:
    world = World()
    for _ in range(20):
        assert world.run(STANDSTILL_S, a0="waiting", e0="waiting", e1="waiting") is None
        world.say(E1, "working")


def test_one_that_has_not_spoken_may_work() -> None:
    world = World()
    assert world.run(SILENT_S, a0="waiting", e0="waiting") is None


def test_without_restarts_only_the_silent_are_judged() -> None:
    world = World(standstill_limit_s=None)
    assert world.run(60.0, a0="waiting", e0="waiting", e1="waiting") is None


def test_a_loop_that_was_away_blames_nobody() -> None:
    """The nodes' reports of that time have not been read yet."""
    world = World()
    assert world.run(1.0, a0="waiting", e0="waiting", e1="working") is None
    world.now += 100 * MAX_GAP_S
    assert world.run(TICK_S) is None  # it is back
    assert world.run(SILENT_S) is None
    verdict = world.run(TICK_S)
    assert verdict is not None
    assert verdict.member == A0


def test_without_a_step_nobody_is_watched() -> None:
    world = World()
    world.head = None
    assert world.run(60.0) is None
