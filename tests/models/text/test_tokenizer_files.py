"""Added and special tokens of every file count as transformers.AutoTokenizer counts them."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, normalizers

from models.text.tokenizer import IncrementalDetokenizer, Tokenizer
from models.text.tokenizer_files import effective_tokenizer
from tests.models.text.backends import byte_level, pieces

_WORDS = ["<|im_start|>", "<|im_end|>", "<tool>", "<think>", "<|x y|>", "[PAD]", "<s>", "</s>"]
_WORDS += ["<|endoftext|>", "<unk>"]
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "image_token", "sep_token")
_TEXTS = ("the {}the{} a\n{} b", "{}{}{}", " {} user\nhello{} {}1234 don't")


def _neox(vocab_words: list[str]) -> tokenizers.Tokenizer:
    backend = byte_level(vocab_words)
    backend.normalizer = normalizers.NFC()
    return backend


# Each with the model_type and the tokenizer_class of such checkpoints.
_SHAPES: dict[str, tuple[Callable[[list[str]], tokenizers.Tokenizer], str, str | None]] = {
    "chatml": (byte_level, "llama", "PreTrainedTokenizerFast"),
    "llama-3": (byte_level, "llama", "LlamaTokenizerFast"),
    "no class": (byte_level, "llama", None),
    "unknown class": (byte_level, "mixtral", "OurTokenizer"),
    "qwen2": (lambda words: byte_level(words, qwen=True), "qwen2_moe", "Qwen2Tokenizer"),
    "qwen3, no class": (lambda words: byte_level(words, qwen=True), "qwen3_moe", None),
    "qwen3, general": (byte_level, "qwen3_moe", "PreTrainedTokenizerFast"),
    "gpt-2": (byte_level, "llama", "GPT2Tokenizer"),
    "mixtral": (pieces, "mixtral", "LlamaTokenizer"),
    "llama-2": (lambda words: pieces(words, llama=True), "llama", "LlamaTokenizer"),
    "olmoe": (_neox, "olmoe", "GPTNeoXTokenizerFast"),
    "olmoe, no class": (_neox, "olmoe", None),
}


def _as_object(rng: random.Random, word: str, **more: Any) -> dict[str, Any]:
    flags = ("lstrip", "rstrip", "normalized", "single_word")
    return {"content": word, **{flag: rng.random() < 0.2 for flag in flags}, **more}


def _write(path: Path, shape: str, rng: random.Random) -> None:
    """Write a directory whose tokens lie, each in some of them, in its files."""
    make, model_type, class_name = _SHAPES[shape]

    def some(share: float) -> list[str]:
        return [word for word in rng.sample(_WORDS, len(_WORDS)) if rng.random() < share]

    def one(word: str) -> Any:
        return _as_object(rng, word, __type="AddedToken") if rng.random() < 0.3 else word

    backend = make(some(0.3))
    backend.add_tokens(
        [AddedToken(**_as_object(rng, word, special=rng.random() < 0.6)) for word in some(0.5)]
    )
    backend.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {} if class_name is None else {"tokenizer_class": class_name}
    config |= {name: rng.choice([None, one(rng.choice(_WORDS))]) for name in _NAMES[:4]}
    config |= {name: one(rng.choice(_WORDS)) for name in _NAMES if rng.random() < 0.3}
    config |= {name: rng.random() < 0.5 for name in ("add_bos_token", "add_eos_token")}
    if rng.random() < 0.1:
        config["split_special_tokens"] = True
    for name in rng.sample(_NAMES, 2):
        config.pop(name, None)
    if rng.random() < 0.5:
        config["additional_special_tokens"] = [one(word) for word in some(0.3)]
    if rng.random() < 0.3:
        config["extra_special_tokens"] = [one(word) for word in some(0.3)]
    elif rng.random() < 0.3:
        config["extra_special_tokens"] = {"tool_mark": rng.choice(_WORDS)}
    if rng.random() < 0.5:
        first = backend.get_vocab_size()
        config["added_tokens_decoder"] = {
            str(backend.token_to_id(word) or first + idx): _as_object(
                rng, word, special=rng.random() < 0.6
            )
            for idx, word in enumerate(some(0.7))
        }
    if rng.random() < 0.4:
        names = {name: rng.choice(_WORDS) for name in _NAMES if rng.random() < 0.4}
        older: dict[str, Any] = {
            name: word if rng.random() < 0.6 else _as_object(rng, word)
            for name, word in names.items()
        }
        if rng.random() < 0.5:
            older["additional_special_tokens"] = some(0.3)
        (path / "special_tokens_map.json").write_text(json.dumps(older))
    if rng.random() < 0.4:
        new = [word for word in some(0.4) if backend.token_to_id(word) is None]
        first = backend.get_vocab_size()
        ids = {word: first + idx for idx, word in enumerate(new)}
        (path / "added_tokens.json").write_text(json.dumps(ids))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))


def _check_equal(path: Path, rng: random.Random) -> None:
    theirs: Any = importlib.import_module("transformers").AutoTokenizer.from_pretrained(path)
    ours = Tokenizer.from_directory(path)
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    again = tokenizers.Tokenizer.from_str(effective_tokenizer(path).to_str())
    again.encode_special_tokens = theirs.split_special_tokens  # is in no file
    for text in [text.format(*rng.sample(_WORDS, 3)) for text in _TEXTS]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert again.encode(text, add_special_tokens=False).ids == ids
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
        for skip in (False, True):
            shown = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == shown
            stream = IncrementalDetokenizer(ours, prompt_ids=[], skip_special_tokens=skip)
            assert stream.push(ids) + stream.flush() == shown


@pytest.mark.parametrize("shape", _SHAPES)
def test_random_directories_equal_autotokenizer(tmp_path: Path, shape: str) -> None:
    for seed in range(6):
        path = tmp_path / str(seed)
        path.mkdir()
        rng = random.Random(f"{shape} {seed}")
        _write(path, shape, rng)
        _check_equal(path, rng)


def test_a_token_without_a_place_in_the_model_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A text that has it is spelt in pieces, as the model could not read the token."""
    backend = byte_level([])
    backend.save(str(tmp_path / "tokenizer.json"))
    size = backend.get_vocab_size()
    config = {"added_tokens_decoder": {str(size): {"content": "<a>"}}, "pad_token": "[PAD]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size + 1}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("<a>", add_special_tokens=False) == [size]
    ids = tokenizer.encode("[PAD]", add_special_tokens=False)
    assert len(ids) == 5
    assert tokenizer.decode(ids, skip_special_tokens=True) == "[PAD]"
    assert "'[PAD]' is no token" in caplog.text


@pytest.mark.parametrize(
    "config",
    [
        {"additional_special_tokens": [None, 5, {"lstrip": True}, "<a>"]},
        {
            "added_tokens_decoder": {
                "x": "<a>",
                "259": {"content": "<a>", "special": True, "new": 1},
            }
        },
        {"added_tokens_decoder": [], "additional_special_tokens": "<b>", "eos_token": "<a>"},
        {"mask_token": ["<a>"], "bos_token": {"content": "<a>"}},
    ],
)
def test_what_is_no_token_does_not_hinder_the_others(tmp_path: Path, config: Any) -> None:
    byte_level([]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("<a>", add_special_tokens=False) == [259]
    assert tokenizer.special_ids == {259}
