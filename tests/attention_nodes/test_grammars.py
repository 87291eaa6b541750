"""The cache of compiled grammars, and the thread that fills it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from attention_nodes import grammars
from attention_nodes.grammars import CompiledGrammar, Grammars
from tests.attention_nodes.constrained import VOCAB
from tests.checkpoints import EOS_TOKEN_ID, write_tokenizer
from topspin.errors import InvalidRequest
from topspin.grammars import grammar_key

TIMEOUT_S = 60.0


def make(path: Path) -> Grammars:
    write_tokenizer(path)
    return Grammars(path, vocab_size=VOCAB, eos_token_ids=(EOS_TOKEN_ID,))


def compiled(cache: Grammars) -> list[CompiledGrammar]:
    """Wait for what is under way."""
    ended: list[CompiledGrammar] = []
    deadline_s = time.monotonic() + TIMEOUT_S
    while cache.is_compiling:
        ended += cache.take_compiled()
        assert time.monotonic() < deadline_s
    return ended


def test_a_grammar_is_compiled_once_and_each_sequence_has_its_own_matcher(tmp_path: Path) -> None:
    cache = make(tmp_path)
    text = 'start: "a" /[0-9]+/'
    cache.start(grammar_key(text), text)
    cache.start(grammar_key(text), text)
    assert compiled(cache) == [CompiledGrammar(grammar_key(text), "")]
    assert cache.take_compiled() == []
    first, second = cache.matcher(text), cache.matcher(text)
    assert first.consume_tokens([ord("a") - 33])  # the byte level's letters are in order
    assert not first.validate_tokens([ord("a") - 33])
    assert second.validate_tokens([ord("a") - 33]) == 1
    cache.close()


def test_the_reason_against_a_grammar_is_told(tmp_path: Path) -> None:
    cache = make(tmp_path)
    texts = ["start: missing", "start: /a(/", 'start: %json {"uniqueItems": true}']
    for text in texts:
        cache.start(grammar_key(text), text)
    reasons = dict(compiled(cache))
    wanted = ["missing", "unclosed group", "uniqueItems"]
    for text, word in zip(texts, wanted, strict=True):
        assert word in reasons[grammar_key(text)]
        with pytest.raises(InvalidRequest, match=word):
            cache.matcher(text)


def test_the_cache_is_bounded_by_number_and_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(tmp_path)
    monkeypatch.setattr(grammars, "MAX_COMPILED", 3)
    texts = [f"start: /{'a' * 10}{digit}/" for digit in range(5)]
    for text in texts:
        cache.matcher(text)
    held = set(cache._compiled)
    assert held == {grammar_key(text) for text in texts[2:]}
    cache.matcher(texts[2])
    cache.matcher(texts[0])
    assert set(cache._compiled) == {grammar_key(texts[idx]) for idx in (2, 4, 0)}
    monkeypatch.setattr(grammars, "MAX_COMPILED_BYTES", len(texts[0]) + 5)
    cache.matcher(texts[1])
    assert set(cache._compiled) == {grammar_key(texts[1])}
    assert cache._size_bytes == len(texts[1])
    # What was displaced is compiled again.
    assert not cache.matcher(texts[4]).is_error()


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
    cache = Grammars(tmp_path, vocab_size=VOCAB, eos_token_ids=eos)
    cache.start("key", "start: /a/")
    ((key, error),) = compiled(cache)
    assert key == "key"
    assert reason in error
    assert str(tmp_path) not in error
