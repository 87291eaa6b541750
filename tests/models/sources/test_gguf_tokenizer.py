"""Vocabularies of sentencepiece and of tiktoken in GGUF files: the libraries' own tokens."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers

from models.sources.gguf_file import GgufFile
from models.sources.gguf_tokenizer import read_tokenizer
from models.text.byte_level import byte_of_letter
from tests.models.text.test_rank_file import ORACLE, RANKS, SPECIAL, TEXTS
from topspin.errors import ConfigError

CORPUS = Path(__file__).parents[3] / "docs" / "concepts.md"


@pytest.fixture(scope="module")
def trained() -> Any:
    """Return sentencepiece's own processor, trained as Llama 2's and Mixtral's vocabularies."""
    library = importlib.import_module("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.read_text().splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=["<|user|>"],
        minloglevel=2,
    )
    return library.SentencePieceProcessor(model_proto=model.getvalue())


def write(file: Path, trained: Any, **fields: bool) -> tokenizers.Tokenizer:
    """Write the vocabulary as llama.cpp's converter does, and return what is read of it."""
    writer = gguf.GGUFWriter(file, "llama")
    kinds = {"is_unknown": 2, "is_control": 3, "is_unused": 5, "is_byte": 6}
    ids = range(trained.get_piece_size())
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*map(trained.id_to_piece, ids), "[PAD]"])
    scores = [*map(trained.get_score, ids), -1000.0]
    writer.add_token_scores(scores[: fields.pop("cut", None)])
    writer.add_token_types(
        [next((kind for of, kind in kinds.items() if getattr(trained, of)(idx)), 1) for idx in ids]
        + [kinds["is_unused"]]
    )
    writer.add_bos_token_id(trained.bos_id())
    writer.add_eos_token_id(trained.eos_id())
    writer.add_unk_token_id(trained.unk_id())
    for name, value in fields.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_tokenizer(GgufFile(file))


def test_tokens_are_those_of_sentencepiece(tmp_path: Path, trained: Any) -> None:
    found = write(tmp_path / "a.gguf", trained)
    for text in (*TEXTS, *CORPUS.read_text().splitlines(), "  two  spaces", "\u4e2d\U0001f600"):
        ids = trained.encode(text)
        assert found.encode(text, add_special_tokens=False).ids == ids
        assert found.decode(ids) == text
    assert found.encode("the node").ids == [trained.bos_id(), *trained.encode("the node")]


def test_text_behind_a_special_token_begins_anew(tmp_path: Path, trained: Any) -> None:
    """As llama.cpp has it."""
    found = write(tmp_path / "a.gguf", trained, add_bos_token=False)
    user = trained.piece_to_id("<|user|>")
    expected = [*trained.encode("the"), user, *trained.encode("node")]
    assert found.encode("the<|user|>node").ids == expected


def test_unused_tokens_are_no_text(tmp_path: Path, trained: Any) -> None:
    found = write(tmp_path / "a.gguf", trained)
    assert found.decode([*trained.encode("node"), trained.get_piece_size()]) == "node"


def test_a_vocabulary_may_put_no_space_before_a_text(tmp_path: Path, trained: Any) -> None:
    found = write(tmp_path / "a.gguf", trained, add_space_prefix=False, add_bos_token=False)
    ids = found.encode(" the node").ids
    assert ids == trained.encode("the node")
    assert found.decode(ids) == " the node"


def test_scores_that_are_missing_are_named(tmp_path: Path, trained: Any) -> None:
    with pytest.raises(ConfigError, match="scores has 900 entries for 901 tokens"):
        write(tmp_path / "a.gguf", trained, cut=-1)


@pytest.mark.parametrize("has_merges", [True, False])
def test_tokens_are_those_of_tiktoken(tmp_path: Path, has_merges: bool) -> None:
    """As Kimi-K2's converter writes them, and older ones, without merges."""
    letter_of = {byte: letter for letter, byte in byte_of_letter().items()}
    spelt = ["".join(map(letter_of.__getitem__, token)) for token in RANKS]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "deepseek2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("kimi-k2")
    writer.add_token_list([*spelt, *SPECIAL])
    writer.add_token_types([1] * len(spelt) + [3] * len(SPECIAL))
    if has_merges:
        writer.add_token_merges([f"{each[0]} {each[1:]}" for each in spelt if len(each) > 1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_tokenizer(GgufFile(tmp_path / "model.gguf"))
    for text in (*TEXTS, "a[EOS]b<|im_end|>", "<|tool_call_begin|>f<|reserved_"):
        ids = ORACLE.encode(text, allowed_special="all")
        assert found.encode(text, add_special_tokens=False).ids == ids
        assert found.decode(ids, skip_special_tokens=False) == text
