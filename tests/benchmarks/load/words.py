"""Small tokenizers with whole words, trained here, for datasets that generate text."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

SENTENCES = [
    "the serve goes over the net and the return comes back",
    "a long rally ends when one player makes a mistake",
    "spin makes the ball dive and players must read it early",
    "good players wait for the ball and then strike",
]
# So that a word is one token both at the beginning of a text and after a space.
CORPUS = [*SENTENCES, *(word for sentence in SENTENCES for word in sentence.split())] * 4


def write_byte_level(path: Path) -> Path:
    """Write a byte-level BPE tokenizer, as Qwen's and SmolLM's are; returns `path`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _train_and_write(backend, path, initial_alphabet=alphabet)


def write_pieces(path: Path) -> Path:
    """Write a SentencePiece-like tokenizer, as Mixtral's is; returns `path`."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _train_and_write(backend, path, initial_alphabet=[])


def _train_and_write(backend: Tokenizer, path: Path, *, initial_alphabet: list[str]) -> Path:
    trainer = BpeTrainer(vocab_size=700, initial_alphabet=initial_alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken("<|eos|>", special=True)])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    return path
