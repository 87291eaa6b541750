"""The node that is declared dead, and the time, on a simulated clock: the limits are exact."""

from __future__ import annotations

import pytest

from server.scheduler.nodes.roster import Member
from server.scheduler.nodes.watermark import MAX_GAP_S, ProgressVerdict, Watermark
from server.scheduler.planning.in_flight import StepUnderWay
from topspin.messages import Progress, ProgressState

NODES = {"a0": Member("attention", 0), "e0": Member("expert", 0), "e1": Member("expert", 1)}
EXPERTS = [NODES["e0"], NODES["e1"]]
STEP = 7
TICK_S = 0.25
SILENT_S = 5.0
STANDSTILL_S = 1.0


class WatchedEngine:
    """A watermark that is asked at every tick, as in the scheduler's loop."""

    def __init__(self, *, standstill_limit_s: float | None = STANDSTILL_S) -> None:
        self.watermark = Watermark(silent_limit_s=SILENT_S, standstill_limit_s=standstill_limit_s)
        self.now = 100.0
        self.head: StepUnderWay | None = StepUnderWay(STEP, self.now, [0])

    def say(self, name: str, state: ProgressState, *, step: int = STEP) -> None:
        role, index = NODES[name].role, NODES[name].index
        message = Progress(step=step, generation=1, role=role, index=index, state=state)
        self.watermark.heard(message, self.now)

    def run(self, duration_s: float, **states: ProgressState) -> ProgressVerdict | None:
        """Let time pass with the same reports at every tick; return the first verdict."""
        for _ in range(round(duration_s / TICK_S)):
            self.now += TICK_S
            for name, state in states.items():
                self.say(name, state)
            verdict = self.watermark.judge(self.head, EXPERTS, self.now)
            if verdict is not None:
                return verdict
        return None


@pytest.fixture
def engine() -> WatchedEngine:
    """Return an engine that works on a step."""
    return WatchedEngine()


@pytest.mark.parametrize(
    ("states", "dead"),
    [
        ({"a0": "waiting", "e0": "done"}, "e1"),
        ({"e0": "working", "e1": "working"}, "a0"),
        ({"e0": "waiting", "e1": "working"}, "a0"),
    ],
)
def test_the_one_that_says_nothing_is_dead_after_the_limit_and_a_tick(
    engine: WatchedEngine, states: dict[str, ProgressState], dead: str
) -> None:
    verdict = engine.run(60.0, **states)
    assert verdict is not None
    assert verdict.member == NODES[dead]
    assert verdict.silent_s == SILENT_S + TICK_S
    assert engine.now == 100.0 + SILENT_S + TICK_S
    assert "step 7" in verdict.reason
    assert "failover.progress_deadline_s 5" in verdict.reason


def test_a_step_may_take_any_time_while_its_nodes_speak(engine: WatchedEngine) -> None:
    assert engine.run(600.0, a0="waiting", e0="working", e1="waiting") is None
    assert engine.run(600.0, a0="working", e0="done", e1="done") is None


@pytest.mark.parametrize("head", [None, StepUnderWay(STEP, 100.0, [])])
def test_an_attention_node_without_a_step_or_that_has_answered_is_not_watched(
    engine: WatchedEngine, head: StepUnderWay | None
) -> None:
    engine.head = head
    assert engine.run(60.0, e0="working", e1="working") is None
    assert (engine.run(60.0) is None) == (head is None)


def test_silence_is_counted_from_the_step_before_s_end(engine: WatchedEngine) -> None:
    assert engine.run(SILENT_S - TICK_S) is None
    engine.head = StepUnderWay(STEP + 1, engine.now, [0])
    assert engine.run(SILENT_S) is None
    assert engine.run(TICK_S) is not None


def test_a_node_that_is_a_step_ahead_has_done_its_part(engine: WatchedEngine) -> None:
    engine.say("e0", "waiting", step=STEP + 1)
    assert engine.run(60.0, a0="working", e1="working") is None


def test_all_that_wait_for_one_another_have_lost_something(engine: WatchedEngine) -> None:
    verdict = engine.run(60.0, a0="waiting", e0="waiting", e1="done")
    assert verdict is not None
    assert verdict.member is None
    assert verdict.silent_s == STANDSTILL_S + TICK_S
    assert "wait for one another" in verdict.reason


def test_one_that_works_in_between_starts_the_standstill_anew(engine: WatchedEngine) -> None:
    for _ in range(20):
        assert engine.run(STANDSTILL_S, a0="waiting", e0="waiting", e1="waiting") is None
        engine.say("e1", "working")


def test_one_that_has_not_spoken_may_work(engine: WatchedEngine) -> None:
    assert engine.run(SILENT_S, a0="waiting", e0="waiting") is None


def test_without_restarts_only_the_silent_are_judged() -> None:
    engine = WatchedEngine(standstill_limit_s=None)
    assert engine.run(60.0, a0="waiting", e0="waiting", e1="waiting") is None


def test_a_loop_that_was_away_blames_nobody(engine: WatchedEngine) -> None:
    """The nodes' reports of that time have not been read yet."""
    assert engine.run(1.0, a0="waiting", e0="waiting", e1="working") is None
    engine.now += 100 * MAX_GAP_S
    assert engine.run(TICK_S) is None  # it is back
    assert engine.run(SILENT_S) is None
    verdict = engine.run(TICK_S)
    assert verdict is not None
    assert verdict.member == NODES["a0"]
