"""Requests with a grammar wait until the nodes have compiled it, and hold up nobody."""

from __future__ import annotations

import random

import pytest

from server.scheduler.planning.compilations import MAX_KNOWN, MAX_UNDER_WAY, Compilations
from tests.server.scheduler.engine import Engine, make_config, make_request
from topspin.errors import EngineUnavailable
from topspin.grammars import MAX_GRAMMAR_BYTES, grammar_key
from topspin.messages import AddRequest, GrammarReady, RequestFailed

EOS = 5
GRAMMAR = "start: /a+/"


def with_grammar(request_id: str, grammar: str = GRAMMAR) -> AddRequest:
    return make_request(request_id, [1, 2], max_tokens=3, eos_token_ids=(EOS,), grammar=grammar)


def ready(node: int, grammar: str = GRAMMAR, error: str = "") -> GrammarReady:
    return GrammarReady(index=node, key=grammar_key(grammar), error=error)


def keys(engine: Engine) -> list[str]:
    return [message.key for message in engine.policy.compilations.take_unsent()]


def test_others_pass_a_request_whose_grammar_is_compiled() -> None:
    engine = Engine(make_config(num_nodes=2, max_num_seqs=2))
    engine.add(with_grammar("g"))
    engine.add(make_request("r", [3], max_tokens=3))
    assert keys(engine) == [grammar_key(GRAMMAR)]
    assert keys(engine) == []
    while engine.turn():
        pass
    assert engine.clients["r"].ended
    assert engine.policy.compiled(ready(0)) == []
    assert not engine.turn()
    engine.policy.compiled(ready(1))
    engine.finish()
    assert engine.clients["g"].tokens
    engine.add(with_grammar("again"))
    assert keys(engine) == []
    engine.finish()
    stats = engine.policy.stats(0, (), 0.0)
    assert (stats.num_grammars_compiled, stats.num_grammars_found) == (1, 1)


def told(engine: Engine) -> list[str]:
    """Return the requests that a gateway is told are queued, in one message at most."""
    queued = [message for _, message in engine.policy.take_arrivals()]
    assert len(queued) <= 1
    return [each for message in queued for each in message.request_ids]


def test_a_request_counts_as_queued_when_its_grammar_is_compiled() -> None:
    engine = Engine(make_config(num_nodes=2))
    for request_id in ("a", "b", "gone"):
        engine.add(with_grammar(request_id))
    engine.add(make_request("r", [3]))
    engine.add(make_request("s", [4]))
    assert told(engine) == ["r", "s"]
    engine.policy.compiled(ready(0))
    engine.abort("gone")
    assert told(engine) == []
    engine.policy.compiled(ready(1))
    assert told(engine) == ["a", "b"]
    assert told(engine) == []
    engine.add(with_grammar("known"))
    assert told(engine) == ["known"]


def test_a_refused_or_halted_compilation_tells_what_is_true() -> None:
    engine = Engine(make_config(num_nodes=2))
    engine.add(with_grammar("bad"))
    engine.add(with_grammar("other", "start: /b+/"))
    assert told(engine) == []
    engine.policy.compiled(ready(0, error="too large"))
    assert told(engine) == []
    engine.halt([1])
    assert told(engine) == ["other"]


def test_a_refused_grammar_fails_all_who_wait_for_it() -> None:
    engine = Engine(make_config(num_nodes=2))
    engine.add(with_grammar("a"))
    engine.add(with_grammar("b"))
    engine.add(with_grammar("c", "start: /b+/"))
    deliveries = engine.policy.compiled(ready(1, error="too large"))
    failures = [message for _, message in deliveries if isinstance(message, RequestFailed)]
    assert sorted(each.request_id for each in failures) == ["a", "b"]
    assert {(each.status, each.message) for each in failures} == {(400, "too large")}
    assert engine.policy.num_waiting == 1
    assert engine.policy.compiled(ready(0)) == []
    engine.policy.check_integrity()


def test_a_halt_ends_the_wait() -> None:
    """The node that has not answered may be the one that was lost."""
    engine = Engine(make_config(num_nodes=2))
    engine.add(with_grammar("g"))
    keys(engine)
    engine.policy.compiled(ready(0))
    engine.halt([1])
    engine.resume()
    engine.finish()
    assert engine.clients["g"].tokens
    engine.policy.compiled(ready(1))  # it was on its way
    engine.add(with_grammar("later"))
    assert len(keys(engine)) == 1, "the node that comes back has compiled nothing"


def test_an_aborted_request_leaves_nothing() -> None:
    engine = Engine(make_config())
    engine.add(with_grammar("g"))
    engine.abort("g")
    assert not engine.turn()
    assert engine.policy.compiled(ready(0)) == []
    assert engine.policy.num_waiting == 0


def test_what_a_gateway_must_not_ask() -> None:
    engine = Engine(make_config())
    for request in (
        make_request("a", [1], grammar=GRAMMAR),
        make_request("b", [1], grammar=GRAMMAR, eos_token_ids=(EOS,), min_tokens=1),
        make_request("c", [1], grammar="x" * (MAX_GRAMMAR_BYTES + 1), eos_token_ids=(EOS,)),
    ):
        refusal = engine.policy.add(request, peer=b"g", now=engine.now)
        assert refusal is not None
        assert refusal.status == 400
        assert "grammar" in refusal.message


def test_only_so_many_are_compiled_and_remembered() -> None:
    compilations = Compilations()
    asked = [compilations.ask(f"start: /{i}/", [0]) for i in range(MAX_UNDER_WAY)]
    with pytest.raises(EngineUnavailable, match=str(MAX_UNDER_WAY)):
        compilations.ask("start: /x/", [0])
    replayed = compilations.ask("start: /x/", [0], may_refuse=False)
    assert not compilations.is_under_way(replayed)
    assert len(compilations.take_unsent()) == MAX_UNDER_WAY
    assert compilations.ask("start: /0/", [0]) == asked[0]
    compilations.answered(0, asked[0], is_refused=False)
    for i in range(MAX_KNOWN):
        key = compilations.ask(f"start: /{i}{i}/", [0])
        compilations.answered(0, key, is_refused=False)
    compilations.take_unsent()
    compilations.ask("start: /0/", [0])
    assert len(compilations.take_unsent()) == 1


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(each, marks=pytest.mark.slow) for each in range(8, 20))]
)
def test_any_order_of_answers_and_losses_ends_every_request(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(make_config(num_nodes=3, max_num_seqs=2))
    pending: list[GrammarReady] = []
    grammars = [f"start: /{i}/" for i in range(4)]
    for number in range(60):
        action = rng.choice(("add", "add", "turn", "turn", "ready", "ready", "lose"))
        if action == "add":
            grammar = rng.choice([*grammars, ""])
            request = make_request(
                f"r{number}", [1 + number % 7], max_tokens=3, eos_token_ids=(EOS,), grammar=grammar
            )
            assert engine.add(request) is None
            sent = engine.policy.compilations.take_unsent()
            pending += [
                GrammarReady(index=node, key=each.key) for each in sent for node in engine.present
            ]
        elif action == "turn":
            engine.turn()
        elif action == "ready" and pending:
            engine.policy.compiled(pending.pop(rng.randrange(len(pending))))
        elif action == "lose" and len(engine.present) > 1:
            lost = [rng.choice(list(engine.present))]
            engine.halt(lost)
            engine.resume()
            if rng.random() < 0.5:
                pending.clear()
    for each in pending:
        engine.policy.compiled(each)
    engine.finish()
    assert all(client.ended for client in engine.clients.values())
