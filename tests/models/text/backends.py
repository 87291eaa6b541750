"""Tokenizers of the kinds that checkpoints have, with few tokens."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers


def byte_level(vocab_words: Sequence[str] = (), *, qwen: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer whose tokens are bytes, as GPT-2's are; `qwen`: it composes characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("\u0120", "the")]
    vocab = {token: idx for idx, token in enumerate([*alphabet, "th", "the", "\u0120the"])}
    vocab |= {word: len(vocab) + idx for idx, word in enumerate(vocab_words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if qwen:
        qwen2 = importlib.import_module("transformers.models.qwen2.tokenization_qwen2")
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(qwen2.PRETOKENIZE_REGEX), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return backend


def pieces(vocab_words: Sequence[str] = (), *, llama: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer as SentencePiece writes them: as Mixtral's is, or Llama 2's."""
    known = ["\u2581", *"abtheu", "th", "the", "\u2581the"]
    vocab = {token: idx for idx, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in [*known, *vocab_words]:
        vocab.setdefault(word, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    unknown = None if llama else "<unk>"
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    )
    if llama:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend
