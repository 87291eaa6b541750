"""Grammars in processes of their own: what they compile, hold, give up, and do not do to others."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher

from attention_nodes.grammars import processes
from attention_nodes.grammars.processes import CompiledGrammar, Grammars, LostGrammar, MatcherStep
from tests.attention_nodes.constrained import TIMEOUT_S, VOCAB, wait_for_compiled
from tests.checkpoints import EOS_TOKEN_ID, write_tokenizer
from topspin.errors import EngineUnavailable, InvalidRequest
from topspin.grammars import grammar_key

DIGITS = 'start: "a" /[0-9]+/'
A = ord("a") - 33  # the byte level's letters are in order


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Grammars]:
    write_tokenizer(tmp_path)
    grammars = Grammars(tmp_path, vocab_size=VOCAB, eos_token_ids=(EOS_TOKEN_ID,))
    yield grammars
    grammars.close()


def compile_all(cache: Grammars, *texts: str) -> dict[str, CompiledGrammar]:
    """Have grammars compiled; return the answers by text."""
    for text in texts:
        cache.start(grammar_key(text), text)
    answers = {each.key: each for each in wait_for_compiled(cache)}
    return {text: answers[grammar_key(text)] for text in texts}


def pid_of(cache: Grammars, text: str) -> int:
    return cache._processes[grammar_key(text)].pid


def wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline_s, "the process lives on"


def soon_s() -> float:
    return time.monotonic() + TIMEOUT_S


def schema(value: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value))


def test_a_grammar_is_compiled_once_and_each_sequence_has_its_own_matcher(cache: Grammars) -> None:
    key = grammar_key(DIGITS)
    cache.start(key, DIGITS)
    cache.start(key, DIGITS)
    assert wait_for_compiled(cache) == [CompiledGrammar(key, "")]
    pid = pid_of(cache, DIGITS)
    cache.start(key, DIGITS)
    assert cache.take_compiled() == [CompiledGrammar(key, "")]
    assert pid_of(cache, DIGITS) == pid
    first, second = cache.matcher(DIGITS, soon_s()), cache.matcher(DIGITS, soon_s())
    behind, before = cache.follow([MatcherStep(first, [A], None), MatcherStep(second, [], None)])
    assert behind.masks is not None
    assert before.masks is not None
    assert not behind.masks[0, A // 32] >> (A % 32) & 1
    assert before.masks[0, A // 32] >> (A % 32) & 1


def test_the_reason_against_a_grammar_is_told(cache: Grammars) -> None:
    texts = ["start: missing", "start: /a(/", 'start: %json {"uniqueItems": true}']
    wanted = ["missing", "unclosed group", "uniqueItems"]
    answers = compile_all(cache, *texts)
    for text, word in zip(texts, wanted, strict=True):
        assert word in answers[text].error
        assert not answers[text].may_retry
        with pytest.raises(InvalidRequest, match=word):
            cache.matcher(text, soon_s())


CHAIN = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(4000)}
HOSTILE = {
    "a chain of references": schema({"$defs": CHAIN | {"d4000": {}}, "$ref": "#/$defs/d0"}),
    "groups in groups": f"start: /{'(' * 60_000}a{')' * 60_000}/",
    "rules in rules": f"start: {'(' * 60_000}/a/{')' * 60_000}",
    "numbers without end": schema(
        {"allOf": [{"type": "integer", "multipleOf": each} for each in (9973, 9967)]}
    ),
    "repetitions of repetitions": "start: /((a{1,999}b{1,999}){1,999}c){1,999}/",
    "an intersection": "start: A & B\nA: /(.*x.{40})*/\nB: /(.*y.{41})*/",
}


@pytest.mark.parametrize(
    "name",
    # It takes all the CPU time that a grammar may have.
    [
        pytest.param(each, marks=pytest.mark.slow) if each == "numbers without end" else each
        for each in HOSTILE
    ],
)
def test_a_hostile_grammar_is_refused_and_others_are_served_meanwhile(
    cache: Grammars, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(processes, "COMPILE_CPU_S", 0.2)
    compile_all(cache, DIGITS)
    mine = cache.matcher(DIGITS, soon_s())
    text = HOSTILE[name]
    cache.start(grammar_key(text), text)
    answers: list[CompiledGrammar] = []
    num_answered = 0
    deadline_s = time.monotonic() + TIMEOUT_S
    while not answers:
        assert time.monotonic() < deadline_s
        (answer,) = cache.follow([MatcherStep(mine, [], None)])
        assert answer.masks is not None, answer.refusal
        num_answered += 1
        answers = cache.take_compiled()
    assert answers[0].key == grammar_key(text)
    assert num_answered
    if not answers[0].error:  # then masks end it, or it does no harm
        follow_to_the_end(cache, text)
    assert cache.follow([MatcherStep(mine, [], None)])[0].masks is not None


def follow_to_the_end(cache: Grammars, text: str) -> None:
    """Follow a grammar by the least token that it allows, for a while."""
    matcher = cache.matcher(text, soon_s())
    tokens: list[int] = []
    for _ in range(300):
        begun_s = time.monotonic()
        (answer,) = cache.follow([MatcherStep(matcher, tokens, None)])
        assert time.monotonic() - begun_s < TIMEOUT_S
        if answer.masks is None or not answer.rows:
            return
        allowed = [each for each in range(VOCAB) if answer.masks[0, each // 32] >> (each % 32) & 1]
        tokens = allowed[-1:]


@pytest.mark.slow
def test_what_takes_too_long_or_too_much_is_told_apart(
    cache: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep, heavy = HOSTILE["a chain of references"], HOSTILE["numbers without end"]
    monkeypatch.setattr(processes, "COMPILE_CPU_S", 0.3)
    answers = compile_all(cache, deep, heavy)
    assert "too deep" in answers[deep].error
    assert "0.3 s of CPU time" in answers[heavy].error
    monkeypatch.setattr(processes, "COMPILE_CPU_S", 60.0)
    monkeypatch.setattr(processes, "MAX_COMPILED_BYTES", 16 * 2**20)
    answers |= compile_all(cache, heavy + "\n")
    assert "16 MiB of memory" in answers[heavy + "\n"].error
    assert not any(each.may_retry for each in answers.values())


def test_a_compilation_that_nobody_waits_for_ends(cache: Grammars) -> None:
    text = HOSTILE["numbers without end"]
    cache.start(grammar_key(text), text)
    assert cache.num_words  # its process starts once the vocabulary is read
    cache.release(grammar_key(text))
    assert not cache.is_compiling
    assert cache._by_number == {}
    compile_all(cache, DIGITS)
    server = cache._server._child
    assert server is not None
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:  # until there are that of the good one, and one forked ahead
        found = children.read_text().split()
        if len(found) == 2 and str(pid_of(cache, DIGITS)) in found:
            break
        assert time.monotonic() < deadline_s


def test_idle_grammars_are_kept_within_a_number_and_their_memory(
    cache: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MAX_IDLE", 2)
    texts = [f"start: /{'a' * 10}{digit}/" for digit in range(5)]
    for text in texts:
        compile_all(cache, text)
    assert len(cache._processes) == 5, "the scheduler has asked for them"
    used = cache.matcher(texts[0], soon_s())
    pids = [pid_of(cache, text) for text in texts]
    cache.release_all()
    assert set(cache._processes) == {grammar_key(texts[idx]) for idx in (0, 3, 4)}
    lost = cache.take_lost()
    assert lost == [LostGrammar(grammar_key(texts[idx]), "") for idx in (1, 2)]
    wait_until_gone(pids[1])
    cache.end(used)
    assert set(cache._processes) == {grammar_key(texts[idx]) for idx in (0, 4)}
    monkeypatch.setattr(processes, "MAX_IDLE_BYTES", 2**20)
    compile_all(cache, texts[2])
    cache.release_all()
    assert cache._processes == {}, "each holds more"
    # What was displaced is compiled again.
    assert (
        cache.follow([MatcherStep(cache.matcher(texts[4], soon_s()), [], None)])[0].masks
        is not None
    )


def test_a_process_that_dies_takes_its_own_sequences_only(cache: Grammars) -> None:
    other = 'start: "b"'
    compile_all(cache, DIGITS, other)
    mine, its = cache.matcher(DIGITS, soon_s()), cache.matcher(other, soon_s())
    os.kill(pid_of(cache, other), signal.SIGSEGV)
    wait_until_gone(pid_of(cache, other))
    kept, dead = cache.follow([MatcherStep(mine, [], None), MatcherStep(its, [], None)])
    assert kept.masks is not None
    assert "too deep" in dead.refusal
    assert not dead.may_retry
    (lost,) = cache.take_lost()
    assert (lost.key, lost.error) == (grammar_key(other), dead.refusal)
    cache.end(its)
    compile_all(cache, other)
    killed = cache.matcher(other, soon_s())
    os.kill(pid_of(cache, other), signal.SIGKILL)
    (dead,) = cache.follow([MatcherStep(killed, [], None)])
    assert dead.may_retry, "the system may have had too little memory"


@pytest.mark.slow
def test_a_fork_server_that_dies_is_started_again(cache: Grammars) -> None:
    compile_all(cache, DIGITS)
    mine = cache.matcher(DIGITS, soon_s())
    server = cache._server._child
    assert server is not None
    server.kill()
    server.wait()
    assert cache.follow([MatcherStep(mine, [], None)])[0].masks is not None
    other = 'start: "b"'
    answer = compile_all(cache, other)[other]
    if answer.error:  # it was not known yet
        assert answer.may_retry
        answer = compile_all(cache, other)[other]
    assert answer.error == ""


def test_a_grammar_that_is_not_compiled_in_time_fails_for_now(cache: Grammars) -> None:
    heavy = HOSTILE["numbers without end"]
    with pytest.raises(EngineUnavailable, match="not compiled yet"):
        cache.matcher(heavy, time.monotonic() + 0.05)


@pytest.mark.slow
def test_all_ends_with_the_node(cache: Grammars) -> None:
    compile_all(cache, DIGITS)
    pid = pid_of(cache, DIGITS)
    cache.close()
    wait_until_gone(pid)


@pytest.mark.parametrize(
    ("content", "eos", "reason"),
    [
        (None, (EOS_TOKEN_ID,), "has no tokenizer.json"),
        (None, (), "no token that ends a text"),
        ("{}", (EOS_TOKEN_ID,), "tokenizer.json cannot be used"),
    ],
)
def test_a_checkpoint_whose_tokenizer_cannot_be_used(
    tmp_path: Path, content: str | None, eos: tuple[int, ...], reason: str
) -> None:
    if not eos:
        write_tokenizer(tmp_path)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    grammars = Grammars(tmp_path, vocab_size=VOCAB, eos_token_ids=eos)
    grammars.start("key", "start: /a/")
    ((key, error, may_retry),) = wait_for_compiled(grammars)
    assert (key, may_retry) == ("key", False)
    assert reason in error
    assert str(tmp_path) not in error
    grammars.close()
