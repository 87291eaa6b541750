"""A change of the expert table delays no step while the engine runs.

Counted, not timed: one request runs while tables change all the time. The test checks whether the
scheduler ever waits with fewer steps in flight than possible, how many steps the request takes, and
what an expert node does between two steps.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from itertools import pairwise

import pytest

from expert_nodes.tables import TableChange
from server.scheduler.planning.in_flight import MAX_STEPS_IN_FLIGHT
from tests.engine import Engine
from tests.identity.conftest import NUM_TOKENS, CaseOf
from tests.identity.weights.test_expert_tables import config_of, only_copies, random_tables
from topspin.messages import AnyMessage, Message, StepTicket, TablePrepared
from topspin.processes.channel import ControlServer, Event
from topspin.processes.inbox import Inbox

CHUNK = 16
# The tables are ready sooner, unless the machine is busy.
MAX_REQUESTS = 50


class Watched:
    """The scheduler's tickets, and the number of steps in flight whenever it waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine: Engine | None = None
        self.tickets: dict[int, StepTicket] = {}
        self.in_flight: list[tuple[int, int]] = []
        poll, send = ControlServer.poll, ControlServer.send

        def watched_poll(server: ControlServer, timeout_s: float | None) -> list[Event]:
            running = None if self.engine is None else self.engine.service.num_steps_in_flight
            if running is not None:
                self.in_flight.append((len(self.tickets), running))
            return poll(server, timeout_s)

        def watched_send(server: ControlServer, peer: bytes, message: Message) -> bool:
            if isinstance(message, StepTicket):
                self.tickets[message.step] = message
            return send(server, peer, message)

        monkeypatch.setattr(ControlServer, "poll", watched_poll)
        monkeypatch.setattr(ControlServer, "send", watched_send)


def watch_nodes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Return each node thread's actions in order: steps received, empty looks, table work."""
    doings: defaultdict[str, list[str]] = defaultdict(list)
    next_message, work = Inbox.next, TableChange.work

    def watched_next(inbox: Inbox, timeout_s: float | None = None) -> AnyMessage | None:
        message = next_message(inbox, timeout_s)
        if message is None or isinstance(message, StepTicket):
            doing = "nothing came" if message is None else "step"
            doings[threading.current_thread().name].append(doing)
        return message

    def watched_work(change: TableChange) -> TablePrepared | None:
        doings[threading.current_thread().name].append("work")
        return work(change)

    monkeypatch.setattr(Inbox, "next", watched_next)
    monkeypatch.setattr(TableChange, "work", watched_work)
    return doings


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_no_step_waits_for_a_table(
    case_of: CaseOf, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of("mixtral")
    longest = max(range(len(case.prompts)), key=lambda idx: len(case.prompts[idx]))
    prompt, tokens = case.prompts[longest], case.tokens[longest]
    config = config_of(
        case.path,
        (1, 2),
        **only_copies(2),
        transport=transport,
        max_num_batched_tokens=CHUNK,
        prefix_caching=False,
    )
    tables = random_tables((5, 5), seed=5)
    watched, doings = Watched(monkeypatch), watch_nodes(monkeypatch)
    num_steps_each = -(-len(prompt) // CHUNK) + NUM_TOKENS - 1
    with Engine(config) as engine:
        watched.engine = engine
        for num_done in range(1, MAX_REQUESTS + 1):
            [request] = engine.generate_on([prompt], tables, max_tokens=NUM_TOKENS)
            assert request.tokens == tokens
            # As many steps as without table changes: the prompt's chunks, then one per token.
            num_steps = engine.stats().num_steps
            assert num_steps == len(watched.tickets) == num_done * num_steps_each
            if watched.tickets[num_steps].table_version >= 3:
                break
    versions = [watched.tickets[step].table_version for step in range(1, num_steps + 1)]
    assert versions == sorted(versions)
    assert versions[-1] >= 3
    # Waits after the first and before the last step of a request has been sent.
    waits = [running for sent, running in watched.in_flight if sent % num_steps_each]
    assert waits
    assert set(waits) == {MAX_STEPS_IN_FLIGHT}
    # Between two steps an expert node does one piece of table work, and more only while idle.
    for doing in (doings["expert 0"], doings["expert 1"]):
        in_steps = doing[doing.index("step") :]
        assert "work" in in_steps
        assert ("work", "work") not in set(pairwise(in_steps))
