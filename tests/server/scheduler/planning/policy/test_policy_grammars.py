"""Requests with a grammar wait until the nodes have compiled it, and hold up nobody."""

from __future__ import annotations

from typing import Any

import pytest

from server.scheduler.planning.compilations import (
    LONG_S,
    MAX_UNDER_WAY,
    MAX_USED,
    REFUSED_S,
    Compilations,
)
from server.scheduler.planning.outbox import UNTOLD_S
from tests.server.scheduler.engine import Engine, make_config, make_request
from topspin.errors import InvalidRequest, Overloaded
from topspin.grammars import MAX_GRAMMAR_BYTES, grammar_key
from topspin.messages import (
    CompileGrammar,
    GrammarLost,
    GrammarReady,
    ReleaseGrammar,
    RequestFailed,
)

EOS = 5
GRAMMAR, OTHER = "start: /a+/", "start: /b+/"
KEY = grammar_key(GRAMMAR)


class GrammarEngine(Engine):
    """An engine whose nodes compile grammars when the test says so."""

    def __init__(self, **config: int) -> None:
        super().__init__(make_config(**config))

    def ask(
        self, request_id: str, grammar: str = GRAMMAR, *, after_s: float = 0.0
    ) -> tuple[int, str] | None:
        """Add a request with a grammar; returns the status and text of its refusal."""
        message = make_request(
            request_id, [1, 2], max_tokens=3, eos_token_ids=(EOS,), grammar=grammar
        )
        self.now += after_s
        refusal = self.add(message)
        return None if refusal is None else (refusal.status, refusal.message)

    def ready(self, node: int, grammar: str = GRAMMAR, **answer: Any) -> list[RequestFailed]:
        """Let a node answer; returns the requests that fail by it."""
        message = GrammarReady(index=node, key=grammar_key(grammar), **answer)
        outbox = self.policy.compiled(message, self.now)
        return [failed for _, failed in outbox if isinstance(failed, RequestFailed)]

    def asked(self) -> list[str]:
        """Return the grammars that nodes are asked to compile since the last call."""
        sent = self.policy.compilations.take_unsent()
        return [message.key for message in sent if isinstance(message, CompileGrammar)]

    def told(self) -> list[str]:
        """Return the requests that a gateway is told are queued, in one message at most."""
        queued = [message for _, message in self.policy.take_arrivals(self.now)]
        assert len(queued) <= 1
        return [each for message in queued for each in message.request_ids]


def test_others_pass_a_request_whose_grammar_is_compiled() -> None:
    engine = GrammarEngine(num_nodes=2, max_num_seqs=2)
    engine.ask("g")
    engine.add(make_request("r", [3], max_tokens=3))
    assert (engine.asked(), engine.asked()) == ([KEY], [])
    while engine.turn():
        pass
    assert engine.clients["r"].ended
    assert engine.ready(0) == []
    assert not engine.turn()
    engine.ready(1)
    engine.finish()
    assert engine.clients["g"].tokens
    assert engine.policy.compilations.take_unsent() == [ReleaseGrammar(key=KEY)]
    engine.ask("again")
    assert engine.asked() == [KEY], "they keep it; none waits for their answer"
    engine.finish()
    stats = engine.policy.stats(0, (), 0.0)
    assert (stats.num_grammars_compiled, stats.num_grammars_found) == (1, 1)


def test_a_request_counts_as_queued_when_it_has_a_place_or_has_waited_for_long() -> None:
    engine = GrammarEngine(num_nodes=2, max_num_seqs=2)
    for request_id in ("a", "b", "gone"):
        engine.ask(request_id)
    for number, request_id in enumerate("rstuv"):
        engine.add(make_request(request_id, [3], max_tokens=9, seed=number))
    assert engine.told() == []
    engine.schedule()
    assert (engine.told(), engine.told()) == (["r", "s", "t", "u"], [])
    engine.ready(0)
    engine.abort("gone")
    engine.now += UNTOLD_S
    assert engine.told() == ["v"], "the others' grammar is still compiled"
    engine.ready(1)
    assert (engine.told(), engine.told()) == (["a", "b"], [])
    engine.ask("known")
    assert engine.told() == []
    engine.finish()
    assert engine.told() == []


def test_a_refused_grammar_fails_all_who_wait_for_it() -> None:
    engine = GrammarEngine(num_nodes=2)
    engine.ask("a")
    engine.ask("b")
    engine.ask("c", OTHER)
    failures = engine.ready(1, error="too large")
    assert sorted(each.request_id for each in failures) == ["a", "b"]
    assert {(each.status, each.message) for each in failures} == {(400, "too large")}
    assert engine.told() == []
    assert engine.policy.num_waiting == 1
    assert engine.ready(0) == []
    engine.policy.check_integrity()


def test_a_halt_ends_the_wait_and_the_next_nodes_are_asked() -> None:
    """The node that has not answered may be the one that was lost."""
    engine = GrammarEngine(num_nodes=2)
    engine.ask("g")
    engine.asked()
    engine.ready(0)
    engine.halt([1])
    engine.ask("meanwhile", OTHER)
    assert (engine.asked(), engine.told()) == ([], [])
    engine.resume()
    assert engine.asked() == [KEY, grammar_key(OTHER)]
    engine.ready(1)  # it was on its way
    assert not engine.turn()
    engine.ready(0)
    engine.schedule()
    assert engine.told() == ["g"]
    engine.ready(0, OTHER)
    engine.finish()
    assert engine.clients["g"].tokens
    engine.ask("later")
    assert len(engine.asked()) == 1


def test_a_refusal_is_remembered_for_a_time() -> None:
    engine = GrammarEngine()
    engine.ask("a")
    engine.asked()
    engine.ready(0, error="too deep")
    assert engine.ask("b", after_s=REFUSED_S / 2) == (400, "too deep")
    assert engine.asked() == []
    assert engine.ask("c", after_s=REFUSED_S / 2) is None
    assert engine.asked() == [KEY]


def test_a_grammar_that_is_not_to_blame_may_come_again() -> None:
    engine = GrammarEngine()
    engine.ask("a")
    assert [each.status for each in engine.ready(0, error="no memory", may_retry=True)] == [503]
    engine.asked()
    assert engine.ask("b") is None
    assert engine.asked() == [KEY]
    engine.ready(0)
    engine.turn()
    engine.ready(0, error="no memory", may_retry=True)
    assert engine.ask("c") is None
    assert engine.asked() == [KEY], "b goes on, c does not wait for ever"


def test_a_grammar_that_masks_have_ended_is_refused() -> None:
    engine = GrammarEngine()
    engine.ask("a")
    engine.ready(0)
    engine.policy.lost_grammar(GrammarLost(index=0, key=KEY, error="too complex"), engine.now)
    assert engine.ask("b") == (400, "too complex")


def test_a_node_that_has_lost_a_grammar_is_asked_again() -> None:
    engine = GrammarEngine(max_num_seqs=1)
    engine.ask("a")
    engine.asked()
    engine.ready(0)
    lost = GrammarLost(index=0, key=KEY)
    engine.policy.lost_grammar(lost, engine.now)
    assert engine.asked() == [KEY]
    assert not engine.turn()
    engine.ready(0)
    engine.finish()
    engine.policy.lost_grammar(lost, engine.now)
    assert engine.asked() == []
    engine.ask("b")
    assert engine.asked() == [KEY]
    assert not engine.turn(), "it waits for the answer"


def test_an_aborted_request_leaves_nothing() -> None:
    engine = GrammarEngine()
    engine.ask("g")
    engine.ask("other")
    engine.asked()
    engine.abort("g")
    assert engine.policy.compilations.take_unsent() == []
    engine.abort("other")
    assert engine.policy.compilations.take_unsent() == [ReleaseGrammar(key=KEY)]
    assert engine.ready(0) == []
    assert engine.policy.num_waiting == 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"grammar": GRAMMAR},
        {"grammar": GRAMMAR, "eos_token_ids": (EOS,), "min_tokens": 1},
        {"grammar": "x" * (MAX_GRAMMAR_BYTES + 1), "eos_token_ids": (EOS,)},
    ],
)
def test_what_a_gateway_must_not_ask(sampling: dict[str, Any]) -> None:
    refusal = GrammarEngine().add(make_request("a", [1], **sampling))
    assert refusal is not None
    assert refusal.status == 400
    assert "grammar" in refusal.message


def test_only_so_many_are_compiled_at_once_and_the_oldest_makes_room() -> None:
    engine = GrammarEngine(max_num_queued_reqs=2 * MAX_USED)
    for number in range(MAX_UNDER_WAY):
        assert engine.ask(f"r{number}", f"start: /{number}/") is None
    refusal = engine.ask("x")
    assert refusal is not None
    assert refusal[0] == 429
    assert engine.ask("y", after_s=LONG_S) is None
    ((_, failed),) = engine.policy.displace_grammars()
    assert isinstance(failed, RequestFailed)
    assert (failed.request_id, failed.status) == ("r0", 429)
    sent = engine.policy.compilations.take_unsent()
    oldest = ReleaseGrammar(key=grammar_key("start: /0/"))
    assert sent[-2:] == [CompileGrammar(key=KEY, grammar=GRAMMAR), oldest]


def test_only_so_many_are_held() -> None:
    compilations = Compilations()
    for number in range(MAX_USED):
        compilations.answered(0, compilations.ask(f"start: /{number}/", [0], now=0.0))
    with pytest.raises(Overloaded, match=str(MAX_USED)):
        compilations.ask(GRAMMAR, [0], now=0.0)
    compilations.ask(GRAMMAR, [0], now=0.0, may_refuse=False)  # a replay
    first = compilations.ask("start: /0/", [0], now=0.0)
    compilations.refused(first, "no", now=0.0)
    with pytest.raises(InvalidRequest, match="no"):
        compilations.ask("start: /0/", [0], now=0.0, may_refuse=False)
