"""Requests with a grammar wait until the nodes have compiled it, and hold up nobody."""

from __future__ import annotations

import random

import pytest

from server.scheduler.planning.compilations import (
    LONG_S,
    MAX_UNDER_WAY,
    MAX_USED,
    REFUSED_S,
    Compilations,
)
from tests.server.scheduler.engine import Engine, make_config, make_request
from topspin.errors import InvalidRequest, Overloaded
from topspin.grammars import MAX_GRAMMAR_BYTES, grammar_key
from topspin.messages import (
    AddRequest,
    CompileGrammar,
    GrammarLost,
    GrammarReady,
    ReleaseGrammar,
    RequestFailed,
)

EOS = 5
GRAMMAR = "start: /a+/"


def with_grammar(request_id: str, grammar: str = GRAMMAR) -> AddRequest:
    return make_request(request_id, [1, 2], max_tokens=3, eos_token_ids=(EOS,), grammar=grammar)


def ready(node: int, grammar: str = GRAMMAR, error: str = "") -> GrammarReady:
    return GrammarReady(index=node, key=grammar_key(grammar), error=error)


def keys(engine: Engine) -> list[str]:
    """Return the grammars that nodes are asked to compile."""
    sent = engine.policy.compilations.take_unsent()
    return [message.key for message in sent if isinstance(message, CompileGrammar)]


def compiled(engine: Engine, message: GrammarReady) -> list[RequestFailed]:
    """Give the policy a node's answer; return the requests that it fails."""
    deliveries = engine.policy.compiled(message, engine.now)
    return [message for _, message in deliveries if isinstance(message, RequestFailed)]


def test_others_pass_a_request_whose_grammar_is_compiled() -> None:
    engine = Engine(make_config(num_nodes=2, max_num_seqs=2))
    engine.add(with_grammar("g"))
    engine.add(make_request("r", [3], max_tokens=3))
    assert keys(engine) == [grammar_key(GRAMMAR)]
    assert keys(engine) == []
    while engine.turn():
        pass
    assert engine.clients["r"].ended
    assert compiled(engine, ready(0)) == []
    assert not engine.turn()
    compiled(engine, ready(1))
    engine.finish()
    assert engine.clients["g"].tokens
    sent = engine.policy.compilations.take_unsent()
    assert sent == [ReleaseGrammar(key=grammar_key(GRAMMAR))]
    engine.add(with_grammar("again"))
    assert keys(engine) == [grammar_key(GRAMMAR)], "they keep it; none waits for their answer"
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
    compiled(engine, ready(0))
    engine.abort("gone")
    assert told(engine) == []
    compiled(engine, ready(1))
    assert told(engine) == ["a", "b"]
    assert told(engine) == []
    engine.add(with_grammar("known"))
    assert told(engine) == ["known"]


def test_a_refused_or_halted_compilation_tells_what_is_true() -> None:
    engine = Engine(make_config(num_nodes=2))
    engine.add(with_grammar("bad"))
    engine.add(with_grammar("other", "start: /b+/"))
    assert told(engine) == []
    compiled(engine, ready(0, error="too large"))
    assert told(engine) == []
    engine.halt([1])
    assert told(engine) == []
    engine.resume()
    compiled(engine, ready(0, "start: /b+/"))
    assert told(engine) == ["other"]


def test_a_refused_grammar_fails_all_who_wait_for_it() -> None:
    engine = Engine(make_config(num_nodes=2))
    engine.add(with_grammar("a"))
    engine.add(with_grammar("b"))
    engine.add(with_grammar("c", "start: /b+/"))
    failures = compiled(engine, ready(1, error="too large"))
    assert sorted(each.request_id for each in failures) == ["a", "b"]
    assert {(each.status, each.message) for each in failures} == {(400, "too large")}
    assert engine.policy.num_waiting == 1
    assert compiled(engine, ready(0)) == []
    engine.policy.check_integrity()


def test_a_halt_ends_the_wait_and_the_next_nodes_are_asked() -> None:
    """The node that has not answered may be the one that was lost."""
    engine = Engine(make_config(num_nodes=2))
    engine.add(with_grammar("g"))
    keys(engine)
    compiled(engine, ready(0))
    engine.halt([1])
    engine.add(with_grammar("meanwhile", "start: /b/"))
    assert keys(engine) == []
    engine.resume()
    assert keys(engine) == [grammar_key(GRAMMAR), grammar_key("start: /b/")]
    assert not engine.turn()
    compiled(engine, ready(1))  # it was on its way
    assert not engine.turn()
    compiled(engine, ready(0))
    compiled(engine, ready(0, "start: /b/"))
    engine.finish()
    assert engine.clients["g"].tokens
    engine.add(with_grammar("later"))
    assert len(keys(engine)) == 1


def test_a_refusal_is_remembered_for_a_time() -> None:
    engine = Engine(make_config())
    engine.add(with_grammar("a"))
    keys(engine)
    compiled(engine, ready(0, error="too deep"))
    refusal = engine.policy.add(with_grammar("b"), peer=b"g", now=engine.now + REFUSED_S / 2)
    assert refusal is not None
    assert (refusal.status, refusal.message) == (400, "too deep")
    assert keys(engine) == []
    assert engine.policy.add(with_grammar("c"), peer=b"g", now=engine.now + REFUSED_S) is None
    assert keys(engine) == [grammar_key(GRAMMAR)]


def test_a_grammar_that_is_not_to_blame_may_come_again() -> None:
    engine = Engine(make_config())
    engine.add(with_grammar("a"))
    keys(engine)
    answer = GrammarReady(index=0, key=grammar_key(GRAMMAR), error="no memory", may_retry=True)
    assert [each.status for each in compiled(engine, answer)] == [503]
    assert engine.add(with_grammar("b")) is None
    assert keys(engine) == [grammar_key(GRAMMAR)]
    compiled(engine, ready(0))
    engine.turn()
    compiled(engine, answer)
    assert engine.add(with_grammar("c")) is None
    assert keys(engine) == [grammar_key(GRAMMAR)], "b goes on, c does not wait for ever"


def test_a_grammar_that_masks_have_ended_is_refused() -> None:
    engine = Engine(make_config())
    engine.add(with_grammar("a"))
    keys(engine)
    compiled(engine, ready(0))
    engine.policy.lost_grammar(
        GrammarLost(index=0, key=grammar_key(GRAMMAR), error="too complex"), engine.now
    )
    refusal = engine.policy.add(with_grammar("b"), peer=b"g", now=engine.now)
    assert refusal is not None
    assert refusal.message == "too complex"


def test_a_node_that_has_lost_a_grammar_is_asked_again() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    engine.add(with_grammar("a"))
    keys(engine)
    compiled(engine, ready(0))
    lost = GrammarLost(index=0, key=grammar_key(GRAMMAR))
    engine.policy.lost_grammar(lost, engine.now)
    assert keys(engine) == [grammar_key(GRAMMAR)]
    assert not engine.turn()
    compiled(engine, ready(0))
    engine.finish()
    engine.policy.lost_grammar(lost, engine.now)
    assert keys(engine) == []
    engine.add(with_grammar("b"))
    assert keys(engine) == [grammar_key(GRAMMAR)]
    assert not engine.turn(), "it waits for the answer"


def test_an_aborted_request_leaves_nothing() -> None:
    engine = Engine(make_config())
    engine.add(with_grammar("g"))
    engine.add(with_grammar("other"))
    keys(engine)
    engine.abort("g")
    assert engine.policy.compilations.take_unsent() == []
    engine.abort("other")
    sent = engine.policy.compilations.take_unsent()
    assert sent == [ReleaseGrammar(key=grammar_key(GRAMMAR))], "its last client is gone"
    assert not engine.turn()
    assert compiled(engine, ready(0)) == []
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


def test_only_so_many_are_compiled_at_once_and_the_oldest_makes_room() -> None:
    engine = Engine(make_config(max_queued_requests=2 * MAX_USED))
    for number in range(MAX_UNDER_WAY):
        assert engine.add(with_grammar(f"r{number}", f"start: /{number}/")) is None
    refusal = engine.policy.add(with_grammar("x"), peer=b"g", now=engine.now)
    assert refusal is not None
    assert refusal.status == 429
    assert engine.policy.add(with_grammar("y"), peer=b"g", now=engine.now + LONG_S) is None
    ((_, failed),) = engine.policy.displace_grammars()
    assert isinstance(failed, RequestFailed)
    assert (failed.request_id, failed.status) == ("r0", 429)
    sent = engine.policy.compilations.take_unsent()
    assert sent[-2:] == [
        CompileGrammar(key=grammar_key(GRAMMAR), grammar=GRAMMAR),
        ReleaseGrammar(key=grammar_key("start: /0/")),
    ]


def test_only_so_many_are_held() -> None:
    compilations = Compilations()
    for number in range(MAX_USED):
        key = compilations.ask(f"start: /{number}/", [0], now=0.0)
        compilations.answered(0, key)
    with pytest.raises(Overloaded, match=str(MAX_USED)):
        compilations.ask("start: /x/", [0], now=0.0)
    compilations.ask("start: /x/", [0], now=0.0, may_refuse=False)  # a replay
    assert compilations.ask("start: /0/", [0], now=0.0) == grammar_key("start: /0/")
    compilations.refused(grammar_key("start: /0/"), "no", now=0.0)
    with pytest.raises(InvalidRequest, match="no"):
        compilations.ask("start: /0/", [0], now=0.0, may_refuse=False)


def answers(engine: Engine) -> list[GrammarReady]:
    """Return what the nodes will answer to what they have been sent."""
    return [GrammarReady(index=node, key=key) for key in keys(engine) for node in engine.present]


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
        elif action == "turn":
            engine.turn()
        elif action == "ready" and pending:
            compiled(engine, pending.pop(rng.randrange(len(pending))))
        elif action == "lose" and len(engine.present) > 1:
            lost = [rng.choice(list(engine.present))]
            engine.halt(lost)
            engine.resume()
            if rng.random() < 0.5:
                pending.clear()
        pending += answers(engine)
    for each in pending:
        compiled(engine, each)
    engine.finish()
    assert all(client.ended for client in engine.clients.values())
