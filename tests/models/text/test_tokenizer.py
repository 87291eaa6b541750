"""models.text.tokenizer equals transformers, and a stream equals decoding the whole."""

from __future__ import annotations

import importlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from models.text.tokenizer import IncrementalDetokenizer, Tokenizer, text_before
from tests.checkpoints import write_tokenizer
from tests.models.text import backends
from topspin.errors import ConfigError, InvalidRequest

TEXTS = [
    "",
    "the other the in  an\tinner\n\n thing",
    "  leading and trailing  ",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 emoji \U0001f3d3",
    "na\u00efve caf\u00e9 \u00a0 \u0416",
    "<|user|>hello<|eos|>",
    "don't stop 1234567 !!",
]


def _byte_level(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path)
    return Tokenizer.from_directory(tmp_path)


_PIECES = backends.pieces().get_vocab()


def _write_pieces(path: Path) -> None:
    """Write a SentencePiece-like tokenizer as Mixtral's and Llama 2's are."""
    backend = backends.pieces()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<s>", "</s>", "<unk>")]
    )
    backend.save(str(path / "tokenizer.json"))
    bos_token = {"__type": "AddedToken", "content": "<s>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos_token}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))


def _pieces(tmp_path: Path) -> Tokenizer:
    _write_pieces(tmp_path)
    return Tokenizer.from_directory(tmp_path)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _pieces(tmp_path_factory.mktemp("pieces"))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "pieces"])
def test_ids_and_text_equal_those_of_transformers(tmp_path: Path, kind: str, text: str) -> None:
    ours = _byte_level(tmp_path) if kind == "byte_level" else _pieces(tmp_path)
    auto = importlib.import_module("transformers").AutoTokenizer
    theirs: Any = auto.from_pretrained(tmp_path)
    for add_special_tokens in (False, True):
        ids = ours.encode(text, add_special_tokens=add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.pad_token_id == theirs.pad_token_id


def test_round_trip_of_byte_level_text(byte_level: Tokenizer) -> None:
    for text in TEXTS:
        ids = byte_level.encode(text, add_special_tokens=True)
        assert byte_level.decode(ids, skip_special_tokens=False) == text


def test_tokens_are_shown_by_their_bytes(byte_level: Tokenizer, pieces: Tokenizer) -> None:
    the = byte_level.token_id("\u0120the")
    assert the is not None
    assert byte_level.token_bytes(the) == b" the"
    assert byte_level.token_text(the) == " the"
    half = byte_level.encode("\u4f60", add_special_tokens=False)[0]
    assert byte_level.token_bytes(half) == b"\xe4"
    assert byte_level.token_text(half) == "\ufffd"
    assert pieces.token_bytes(_PIECES["\u2581the"]) == b" the"
    assert pieces.token_bytes(_PIECES["<0xE4>"]) == b"\xe4"
    assert pieces.token_bytes(_PIECES["</s>"]) == b"</s>"
    assert pieces.is_lone_byte(_PIECES["<0xE4>"])
    assert not pieces.is_lone_byte(_PIECES["<unk>"])
    for tokenizer in (byte_level, pieces):
        assert tokenizer.token_bytes(10**6) == b""


def test_special_ids(byte_level: Tokenizer) -> None:
    assert {byte_level.token_text(idx) for idx in byte_level.special_ids} == {
        "<|bos|>",
        "<|eos|>",
        "<|user|>",
        "<|assistant|>",
        "<|system|>",
    }
    assert byte_level.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def test_lone_surrogates_are_the_clients_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        byte_level.encode("a\ud800b", add_special_tokens=False)


def test_unusable_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is not a tokenizer"):
        Tokenizer.from_directory(tmp_path)
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    for decoder in (None, decoders.WordPiece()):
        if decoder is not None:
            backend.decoder = decoder
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ConfigError, match=r"decoder .* is not supported"):
            Tokenizer.from_directory(tmp_path)
    backend.decoder = decoders.Strip(" ", 0, 1)
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="Strip"):
        Tokenizer.from_directory(tmp_path)


def _stream(
    tokenizer: Tokenizer, prompt: list[int], chunks: list[list[int]], *, skip: bool
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


def test_no_half_character_comes_out(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a\U0001f600b\u4f60", add_special_tokens=False)
    parts = _stream(byte_level, [], [[idx] for idx in ids[:-1]], skip=True)
    assert parts == ["a", "", "", "", "\U0001f600", "b", "", "", "\ufffd"]


def test_a_character_begun_by_the_prompt_is_completed(
    byte_level: Tokenizer, pieces: Tokenizer
) -> None:
    ids = byte_level.encode("x\u4f60!", add_special_tokens=False)
    assert "".join(_stream(byte_level, ids[:3], [ids[3:]], skip=True)) == "\u4f60!"
    prompt = [_PIECES["a"], _PIECES["<0xE4>"], _PIECES["<0xBD>"]]
    assert "".join(_stream(pieces, prompt, [[_PIECES["<0xA0>"]]], skip=True)) == "\u4f60"
    whole = [*prompt, _PIECES["<0xA0>"]]
    assert "".join(_stream(pieces, whole, [[_PIECES["\u2581the"]]], skip=True)) == " the"


def test_a_space_at_the_boundary_is_kept(pieces: Tokenizer) -> None:
    the = _PIECES["\u2581the"]
    assert "".join(_stream(pieces, [the], [[the], [the]], skip=True)) == " the the"
    assert "".join(_stream(pieces, [_PIECES["<s>"]], [[the], [the]], skip=True)) == "the the"


def test_a_run_of_bytes_is_held_until_it_ends(pieces: Tokenizer) -> None:
    """One bad byte spoils its whole run, so no byte of the run may be emitted early."""
    run = [[_PIECES[f"<0x{byte:02X}>"]] for byte in b"\xe4\xbd\xa0\xff"]
    parts = _stream(pieces, [_PIECES["a"]], [*run, [_PIECES["b"]]], skip=True)
    assert parts == ["", "", "", "", "\ufffd" * 4 + "b", ""]


# Few ids, mostly pieces of multi-byte characters, so that random streams often form some.
_BYTES = [*b"a \xe4\xbd\xa0\xf0\x9f\x98\x80\xed\xa0\xc3\xff"]


def _chunked(ids: st.SearchStrategy[int]) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(ids, max_size=4), max_size=12)


def _check(tokenizer: Tokenizer, prompt: list[int], chunks: list[list[int]], skip: bool) -> None:
    generated = [idx for chunk in chunks for idx in chunk]
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + generated, skip_special_tokens=skip)
    assert before + "".join(_stream(tokenizer, prompt, chunks, skip=skip)) == whole


@given(data=st.data(), skip=st.booleans())
def test_random_byte_level_streams_equal_decoding_whole(
    byte_level: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    alphabet = {byte_level.token_bytes(idx): idx for idx in range(256)}
    ids = st.sampled_from([alphabet[bytes([byte])] for byte in _BYTES]) | st.integers(0, 300)
    prompt = byte_level.encode(data.draw(st.sampled_from(TEXTS)), add_special_tokens=False)
    _check(byte_level, prompt, data.draw(_chunked(ids)), skip)


@given(data=st.data(), skip=st.booleans())
def test_random_piece_streams_equal_decoding_whole(
    pieces: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = st.sampled_from([3 + byte for byte in _BYTES]) | st.integers(0, len(_PIECES) + 1)
    letters = st.sampled_from(
        [_PIECES["\u2581"], _PIECES["\u2581the"], _PIECES["b"], _PIECES["<s>"]]
    )
    _check(pieces, data.draw(st.lists(letters, max_size=4)), data.draw(_chunked(ids)), skip)


@pytest.mark.parametrize("kind", ["byte_level", "pieces"])
@given(data=st.data())
def test_a_prompts_text_and_the_stream_after_it_are_the_whole(
    request: pytest.FixtureRequest, kind: str, data: st.DataObject
) -> None:
    """Wherever the prompt ends, also within a character; but whole bytes cannot be spoilt later."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    alphabet = {tokenizer.token_bytes(idx): idx for idx in reversed(range(tokenizer.vocab_size))}
    ids = st.sampled_from([alphabet[bytes([byte])] for byte in _BYTES]) | st.integers(0, 260)
    prompt = data.draw(st.lists(ids, max_size=6))
    generated = data.draw(st.lists(ids, max_size=12))
    before = text_before(tokenizer, prompt, skip_special_tokens=False)
    if before == tokenizer.decode(prompt, skip_special_tokens=False):
        assume(not all(map(tokenizer.is_lone_byte, prompt[-1:] + generated[:1])))
    whole = tokenizer.decode(prompt + generated, skip_special_tokens=False)
    assert before + "".join(_stream(tokenizer, prompt, [generated], skip=False)) == whole


def test_pushing_costs_by_its_own_tokens(pieces: Tokenizer, monkeypatch: Any) -> None:
    """The decoded window does not grow with the stream."""
    decoded: list[int] = []
    original = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int], *, skip_special_tokens: bool) -> str:
        decoded.append(len(ids))
        return original(self, ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    the = _PIECES["\u2581the"]
    assert "".join(_stream(pieces, [the] * 500, [[the]] * 500, skip=True)) == " the" * 500
    assert max(decoded) <= 2
    assert len(decoded) <= 2 * 500 + 2


def _composing() -> Tokenizer:
    """Return a byte-level tokenizer that composes characters first, as Qwen's do."""
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]
        )
    )
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={}, source="test")


def _without_some_bytes() -> Tokenizer:
    """Return a byte-level tokenizer that has no token for two control characters and 0xF1."""
    missing = {chr(0x100 + 4), chr(0x100 + 6), chr(0xF1)}
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - missing)
    tokens = [*alphabet, "ab", "abab"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: idx for idx, token in enumerate(tokens)},
            merges=[("a", "b"), ("ab", "ab")],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={}, source="test")


@settings(max_examples=100)
@given(
    st.text(
        st.characters(exclude_categories=["Cs"])
        | st.sampled_from("ab \x04\x06\u1fbe\u0308\u0301\u212a\U00040000"),
        max_size=200,
    )
)
def test_no_text_has_fewer_tokens_than_told_from_its_size(
    bounded: dict[str, Tokenizer], text: str
) -> None:
    for name, tokenizer in bounded.items():
        counted = len(tokenizer.encode(text, add_special_tokens=False))
        assert tokenizer.fewest_tokens(text) <= counted, name


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    path = tmp_path_factory.mktemp("pieces")
    _write_pieces(path)
    return {
        "byte level": _byte_level(tmp_path_factory.mktemp("bytes")),
        "pieces": Tokenizer.from_directory(path),
        "composing": _composing(),
        "incomplete": _without_some_bytes(),
    }


def test_long_text_is_told_to_have_many_tokens(bounded: dict[str, Tokenizer]) -> None:
    text = "abab \u1fbe\u0308\u0301" * 1000
    fewest = {name: tokenizer.fewest_tokens(text) for name, tokenizer in bounded.items()}
    # `<0xAB>` is the longest piece, of 6 bytes; a composed character is made of 7 bytes at most.
    assert fewest["pieces"] == 2000
    assert fewest["composing"] == 3000
    assert fewest["incomplete"] == 3000
    assert fewest["byte level"] > 100


@pytest.mark.parametrize("case", ["strips", "removes", "lowercase", "unknown"])
def test_a_tokenizer_that_leaves_text_out_tells_nothing_from_its_size(case: str) -> None:
    alphabet = {c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if case == "strips":
        backend.add_special_tokens([AddedToken("<|a|>", special=True, rstrip=True)])
    elif case == "removes":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split("x", behavior="removed"), backend.pre_tokenizer]
        )
    elif case == "lowercase":
        backend.normalizer = tokenizers.normalizers.Lowercase()
    else:
        backend.model = models.BPE(vocab={"<unk>": 0}, merges=[], unk_token="<unk>")
        backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(backend, special_tokens={}, source="test")
    assert tokenizer.fewest_tokens("x" * 10_000) == 0


def test_other_threads_run_while_text_is_tokenised_and_tokens_become_text(tmp_path: Path) -> None:
    tokenizer = _byte_level(tmp_path)
    text = "the other the in an inner thing " * 20_000
    ids = tokenizer.encode(text, add_special_tokens=False)
    for work, source in ((tokenizer.encode, text), (tokenizer.decode, ids)):
        option = {"add_special_tokens" if source is text else "skip_special_tokens": True}
        thread = threading.Thread(target=work, args=(source,), kwargs=option)
        thread.start()
        num_turns = 0
        while thread.is_alive():
            num_turns += 1
            time.sleep(0.001)
        # With the interpreter's lock held, this thread would continue only at the end.
        assert num_turns > 5, work
