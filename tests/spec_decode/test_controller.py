"""The controller in a simulated engine: near the best fixed depth, and harmless where all lose."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise, product

import pytest

from spec_decode.controller import (
    FIRST_LIFE,
    HOPE,
    MAX_WAIT,
    REFRESH,
    TRUSTED,
    Controller,
    RowTimes,
    _bucket,
)
from tests.pairwise import cover_pairs

slow = pytest.mark.slow

MOST = 7
ROOM = 128
Step = Callable[[int], float]


class World:
    """Requests that accept each draft token with a probability, and steps of a known duration.

    Outcomes come two steps later than planned, as in an engine that plans ahead.
    """

    def __init__(
        self, step_s: Step, *, noise: float = 0.05, offers: float = 1.0, seed: int = 0
    ) -> None:
        self._step_s = step_s
        self._rng = random.Random(seed)
        self._noise = noise
        self._offers = offers
        self.num_tokens = 0
        self.time_s = 0.0
        self.depths: list[dict[int, int]] = []

    def run(self, accepts: dict[int, float], num_steps: int, controller: Controller) -> None:
        late: list[Callable[[], None]] = []
        for _ in range(num_steps):
            plan = controller.plan(list(accepts), len(accepts), room=ROOM)
            self.depths.append(plan)
            late.append(self._step(accepts, plan, controller))
            if len(late) > 1:
                late.pop(0)()

    def _step(
        self, accepts: dict[int, float], plan: dict[int, int], controller: Controller
    ) -> Callable[[], None]:
        outcomes = []
        for request, depth in plan.items():
            length = depth if self._rng.random() < self._offers else 0
            kept = 0
            while kept < length and self._rng.random() < accepts[request]:
                kept += 1
            self.num_tokens += 1 + kept
            outcomes.append((request, depth, length, kept))
        num_drafted = sum(length for _, _, length, _ in outcomes)
        num_rows = len(plan) + num_drafted
        took_s = self._step_s(num_rows) * (1 + self._noise * self._rng.uniform(-1, 1))
        self.time_s += took_s

        def learn() -> None:
            controller.stepped(num_rows, took_s, num_drafted=num_drafted)
            for request, depth, length, kept in outcomes:
                controller.drafted(request, planned=depth, length=length, accepted=kept)

        return learn

    @property
    def speed(self) -> float:
        return self.num_tokens / self.time_s


def flat(num_rows: int) -> float:
    """Take the same time for 16 rows as for one: a GPU."""
    return 0.01 * (1 + 0.002 * num_rows)


def moe(num_rows: int) -> float:
    """Wake new experts with every row (cost at 4, 8 and 16 rows of one row: 1.9, 2.75, 3.7)."""
    return 0.01 * (0.1 + 6.0 * (1 - 0.85**num_rows))


def steep(num_rows: int) -> float:
    return 0.01 * num_rows


def speed_of(
    step_s: Step, accept: float, depth: int, *, num: int = 1, offers: float = 1.0
) -> float:
    """Return the tokens per second that `num` requests of a fixed depth are expected to get.

    Drafts that come in a share `offers` of the steps are of one request.
    """
    num_tokens = 1 + offers * sum(accept**each for each in range(1, depth + 1))
    took_s = offers * step_s(num * (1 + depth)) + (1 - offers) * step_s(num)
    return num * num_tokens / took_s


WORLDS = (flat, moe, steep), (0.0, 0.3, 0.6, 0.8, 0.95), (1, 4, 16)
PAIRS = cover_pairs(*WORLDS)
LONG = (flat, 0.6, 16), (moe, 0.8, 16), (steep, 0.3, 16), (steep, 0.95, 16)


@pytest.mark.parametrize(
    ("step_s", "accept", "num"),
    [
        pytest.param(*row, marks=[] if row in PAIRS and row not in LONG else slow)
        for row in product(*WORLDS)
    ],
)
def test_the_speed_is_near_that_of_the_best_depth(step_s: Step, accept: float, num: int) -> None:
    plain, *drafted = (speed_of(step_s, accept, depth, num=num) for depth in range(MOST + 1))
    world = World(step_s, seed=1)
    world.run(dict.fromkeys(range(num), accept), 3000, Controller(MOST))
    assert world.speed >= 0.93 * max(plain, *drafted)
    assert world.speed >= 0.97 * plain


def test_more_requests_than_the_limit_are_not_drafted_for() -> None:
    controller = Controller(MOST, most_requests=2)
    controller.stepped(1, 0.01, num_drafted=0)
    for _ in range(TRUSTED):
        controller.stepped(2, 0.01, num_drafted=0)
    assert controller.plan([1, 2, 3], 3, room=64) == {}
    assert all(controller.plan([1, 2], 2, room=64).values())


def test_offers_that_are_rare_cost_nothing_and_are_taken() -> None:
    plain = speed_of(moe, 0.9, 0)
    world = World(moe, offers=0.1, seed=2)
    world.run({0: 0.9}, 3000, Controller(MOST))
    always = max(speed_of(moe, 0.9, depth, offers=0.1) for depth in range(1, MOST + 1))
    assert world.speed >= 0.95 * always > plain


def test_one_request_that_is_never_right_does_not_stop_another() -> None:
    controller = Controller(MOST)
    world = World(moe)
    world.run({0: 0.97, 1: 0.0}, 800, controller)
    tail = world.depths[400:]
    assert sum(each[0] for each in tail) / len(tail) > 2.5
    assert sum(each[1] for each in tail) / len(tail) < 0.25


def test_it_follows_a_text_that_changes() -> None:
    controller = Controller(MOST)
    world = World(flat)
    world.run({0: 0.0}, 2000, controller)
    assert sum(each[0] for each in world.depths[-400:]) < 400
    world.depths.clear()
    world.run({0: 1.0}, MAX_WAIT + 200, controller)
    assert all(each[0] == MOST for each in world.depths[-100:] if each[0])
    assert sum(each[0] for each in world.depths[-100:]) > 90 * MOST


def test_what_loses_is_tried_more_and_more_rarely() -> None:
    world = World(steep)
    world.run({0: 0.1}, 4000, Controller(MOST))
    tried = [
        sum(1 for each in world.depths[begin : begin + 1000] if each[0]) for begin in (0, 3000)
    ]
    assert tried[0] <= 40
    assert 0 < tried[1] <= 8


def test_it_does_not_flicker_at_the_edge() -> None:
    """Where one draft token gains as much as it costs, decisions hold for a while."""
    world = World(lambda num_rows: 0.01 * (1 + 0.5 * (num_rows - 1)), noise=0.1)
    world.run({0: 0.5}, 3000, Controller(1))
    depths = [each[0] for each in world.depths[500:]]
    changes = sum(a != b for a, b in pairwise(depths))
    assert changes < len(depths) // 8


def test_plain_steps_are_measured_while_drafts_win() -> None:
    """A context that grows makes all steps longer; that must not look like a gain of plain ones."""
    world = World(flat)
    world.run({0: 1.0}, 10 * REFRESH, Controller(MOST))
    plain = [idx for idx, each in enumerate(world.depths) if not each[0]]
    assert 8 <= len(plain) <= 12 + TRUSTED


def test_a_new_request_begins_with_what_is_known_of_others() -> None:
    controller = Controller(MOST)
    World(moe).run({0: 0.0}, 500, controller)
    world = World(moe)
    world.run({1: 0.0}, 8, controller)
    assert all(each[1] == 0 for each in world.depths)
    controller.forget([0, 1, 5])
    assert not controller._speculators


def test_times_between_measured_rows_are_interpolated_and_stalls_are_ignored() -> None:
    times = RowTimes()
    assert times.of(3) > times.of(1) > 0
    for _ in range(30):
        times.add(1, 0.010)
        times.add(9, 0.018)
    assert times.of(1) == pytest.approx(0.010)
    assert times.of(5) == pytest.approx(0.014)
    assert times.of(13) == pytest.approx(0.018 + HOPE * 0.004)
    for _ in range(TRUSTED):
        times.add(6, 0.016)
        times.add(12, 0.017)
    assert times.after(1, 20) == pytest.approx([times.of(1 + each) for each in range(1, 21)])
    assert times.after(20, 2) == pytest.approx([times.of(21), times.of(22)])
    times = RowTimes()
    for _ in range(30):
        times.add(1, 0.010)
        times.add(9, 0.018)
    times.add(1, 5.0)
    assert times.of(1) < 0.0115
    for _ in range(TRUSTED):
        times.add(4, 0.001)
    assert times.of(4) == times.of(1) <= times.of(9), "more rows take no less time"


def test_the_first_steps_of_a_shape_may_be_longer() -> None:
    times = RowTimes()
    for took_s in (0.5, 0.3, 0.010):
        assert times.least_rows == float("inf")
        times.add(1, took_s)
    times.add(1, 0.012)
    assert times.of(1) == pytest.approx(0.010)
    for _ in range(TRUSTED - 1):
        times.add(8, 0.7)
        assert times.of(8) < 0.02, "nothing is known of 8 rows yet"
    times.add(8, 0.015)
    assert times.of(8) == pytest.approx(0.015)


def test_times_that_are_not_measured_any_more_are_forgotten_later_and_later() -> None:
    times = RowTimes()
    waits = []
    for _ in range(3):
        for _ in range(TRUSTED):
            times.add(4, 1.0)
        waits.append(0)
        while times.of(4) == 1.0:
            times.add(1, 0.01)
            waits[-1] += 1
    assert waits == [FIRST_LIFE + 1, 2 * FIRST_LIFE + 1, 4 * FIRST_LIFE + 1]


@pytest.mark.parametrize("unlucky", [2, 4])
def test_a_machine_that_stalls_at_first_is_measured_again(unlucky: int) -> None:
    """The first steps of some rows are too long by accident: deep drafts are found all the same."""
    met = 0

    def stalled(num_rows: int) -> float:
        nonlocal met
        met += num_rows == unlucky
        return 0.1 if num_rows == unlucky and met <= TRUSTED else flat(num_rows)

    world = World(stalled)
    world.run({0: 0.5}, 8 * FIRST_LIFE, Controller(MOST))
    assert sum(each[0] for each in world.depths[-400:]) > 400 * 3


def test_buckets_are_exact_for_few_rows_and_close_for_many() -> None:
    assert [_bucket(each) for each in range(1, 17)] == [*range(1, 17)]
    for num_rows in range(17, 3000):
        assert abs(_bucket(num_rows) - num_rows) <= 0.0626 * num_rows


def test_there_are_no_more_rows_than_room() -> None:
    controller = Controller(MOST)
    for num_rows in (1, 8, 64):
        for _ in range(9):
            controller.stepped(num_rows, flat(num_rows), num_drafted=0)
    for request in range(8):
        controller.plan([request], 1, room=8)
        for _ in range(30):
            controller.drafted(request, planned=MOST, length=MOST, accepted=MOST)
    for room in (0, 1, 20, 56):
        assert sum(controller.plan(range(8), 8, room=room).values()) == room
