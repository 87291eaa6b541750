"""Large requests are prepared outside the event loop and leave no memory behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from functools import partial

import pytest

from server.gateway.generation.threads import PreparationThreads
from tests.server.gateway.fakes import DEADLINE_S


async def test_the_loop_runs_on_and_memory_is_given_back_when_all_work_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.gateway.generation.threads.TRIM_DELAY_S", 0.0)
    trimmed = threading.Event()
    monkeypatch.setattr("server.gateway.generation.threads.release_freed_memory", trimmed.set)
    threads = PreparationThreads()  # only one may exist
    gates = [threading.Event() for _ in range(2)]
    works = [asyncio.create_task(threads.run(partial(gate.wait, DEADLINE_S))) for gate in gates]
    await asyncio.sleep(0)
    assert not gc.isenabled()
    gates[0].set()
    assert await works[0]
    assert not gc.isenabled()
    await asyncio.sleep(0.01)
    assert not trimmed.is_set(), "while there is work"
    gates[1].set()
    assert await works[1]
    assert gc.isenabled()
    assert await asyncio.to_thread(trimmed.wait, DEADLINE_S)


def test_what_fails_in_a_thread_fails_where_it_is_awaited() -> None:
    def broken() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        asyncio.run(PreparationThreads().run(broken))
    assert gc.isenabled()
