"""Turns: addresses first, then their connections; the event loop goes on after a few."""

from __future__ import annotations

import asyncio

from server.gateway.http.turns import TURNS_AT_ONCE, Turns


class Busy:
    """A connection that always has more to read, `num_left` turns long."""

    def __init__(self, turns: Turns, log: list[str], name: str, num_left: int) -> None:
        self._turns, self._log, self._name, self._num_left = turns, log, name, num_left

    def enter(self) -> None:
        self._turns.enter(self, self._name[0])

    def take_turn(self) -> None:
        self._log.append(self._name)
        self._num_left -= 1
        if self._num_left:
            self.enter()


async def test_addresses_take_turns_and_so_do_their_connections() -> None:
    turns, log = Turns(), list[str]()
    for name, num_turns in (("a1", 3), ("a2", 3), ("a3", 1), ("b1", 2)):
        busy = Busy(turns, log, name, num_turns)
        busy.enter()
        busy.enter()  # which changes nothing
    while len(log) < 9:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert log == ["a1", "b1", "a2", "a3", "a1", "b1", "a2", "a1", "a2"]


async def test_a_new_request_goes_before_long_ones_of_its_address_and_does_not_stop_them() -> None:
    turns, log = Turns(), list[str]()
    for number in range(2 * TURNS_AT_ONCE):
        Busy(turns, log, f"a{number}", 1).enter()
    for number in range(2 * TURNS_AT_ONCE):
        turns.enter(Busy(turns, log, f"anew{number}", 1), "a", is_new=True)
    while len(log) < 4 * TURNS_AT_ONCE:
        await asyncio.sleep(0)
    first = log[:TURNS_AT_ONCE]
    assert first[0] == "anew0"
    assert sum("new" in name for name in first) == 3 * TURNS_AT_ONCE // 4


async def test_the_loop_goes_on_after_a_few_turns() -> None:
    turns, log = Turns(), list[str]()
    for number in range(1000):
        Busy(turns, log, f"a{number}", 2).enter()
    num_passes = 0
    while len(log) < 2000:
        before = len(log)
        await asyncio.sleep(0)
        num_passes += 1
        assert len(log) - before <= TURNS_AT_ONCE
    assert num_passes >= 2000 // TURNS_AT_ONCE


async def test_who_fails_does_not_keep_others_from_their_turn() -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    turns, log = Turns(), list[str]()

    class Broken:
        def take_turn(self) -> None:
            raise RuntimeError("a bug")

    turns.enter(Broken(), "a")
    Busy(turns, log, "b", 1).enter()
    while not log:
        await asyncio.sleep(0)
    assert len(failures) == 1
