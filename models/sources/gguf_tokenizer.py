"""The tokenizer and the chat templates in a GGUF file's metadata, as HuggingFace's files.

Owns how text is split by each `tokenizer.ggml.pre` that is read (those of the families that are
served), the merges of sentencepiece's vocabularies, and which tokens are special. Knows no tensors.
Called by models.sources.gguf_checkpoint and models.sources.gguf_llama. Sources: llama.cpp's
llama-vocab.cpp for what the names mean, and transformers' tokenizers of the families, with which
the tokens agree: where these compose characters first (NFC), so does this one, though llama.cpp
does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from models.sources.gguf_file import GgufFile
from models.text.rank_file import PATTERNS, merges_of
from topspin.errors import ConfigError

_NORMAL: Final = 1
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
# In sentencepiece's tokens, for a space.
_SPACE: Final = "\u2581"
_TEMPLATE: Final = "tokenizer.chat_template"
_SPECIAL: Final[Mapping[str, str]] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_OF_WORD: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """Return the pattern of Llama 3 and Qwen2, which differ in how many digits they join."""
    letters = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    return rf"{_END_OF_WORD}|{letters}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"


_CASED: Final = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_END_OF_WORD}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_END_OF_WORD}?",
        r"\p{N}{1,3}",
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
    )
)


class _Splitting(NamedTuple):
    """How text becomes words: by `pattern`; None: GPT-2's, after single digits if `by_digit`.

    `first` are patterns that cut it before, one after the other. composes: characters are composed
    first. whole_words: a word that is a token is not put together by merges. by_rank: the merges
    are those that make tokens, the lowest token first, whatever the file lists (tiktoken's rule).
    adds_bos: a text begins with that token unless the metadata says otherwise.
    """

    pattern: str | None = None
    by_digit: bool = False
    composes: bool = False
    whole_words: bool = False
    by_rank: bool = False
    adds_bos: bool = False
    first: tuple[str, ...] = ()


# Cased letters of the Unicode of its time, but Georgian's and those of mathematics.
_DEEPSEEK_LETTERS: Final = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}"
    r"\x{A790}-\x{A7FF}\x{AB30}-\x{AB6F}\x{10570}-\x{105BF}\x{10D50}-\x{10D8F}\x{16E40}-\x{16E7F}"
    r"\x{1D400}-\x{1D7FF}\x{1DF00}-\x{1DFFF}]]"
)
_DEEPSEEK: Final = _Splitting(
    r"\p{N}",
    first=(
        r"[\r\n]",
        rf"\s?{_DEEPSEEK_LETTERS}+",
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
        r"\s+$",
        r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+",
    ),
)
_DEEPSEEK_V3: Final = _Splitting(
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
    first=(r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"),
)
_LLAMA_3: Final = _Splitting(_words(r"\p{N}{1,3}"), whole_words=True, adds_bos=True)
SPLITTINGS: Final[Mapping[str, _Splitting]] = {
    "deepseek-llm": _DEEPSEEK,
    "deepseek-v3": _DEEPSEEK_V3,
    "glm4": _Splitting(_words(r"\p{N}{1,3}"), whole_words=True),
    "gpt-2": _Splitting(),
    "gpt-4o": _Splitting(_CASED),
    "kimi-k2": _Splitting(PATTERNS["kimi_k2"], whole_words=True, by_rank=True),
    "llama-bpe": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "llama3": _LLAMA_3,
    "minimax-m2": _Splitting(_CASED),
    "olmo": _Splitting(composes=True),
    "qwen2": _Splitting(_words(r"\p{N}"), composes=True),
    "smollm": _Splitting(by_digit=True),
}
"""By `tokenizer.ggml.pre`."""


def read_tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    """Return the tokenizer with its special tokens: byte-level BPE, or sentencepiece's.

    Raises ConfigError for any other kind of vocabulary, and for a `tokenizer.ggml.pre` of
    byte-level BPE that is not one of SPLITTINGS.
    """
    kind = file.field("tokenizer.ggml.model")
    readers = {"gpt2": _read_byte_level, "llama": _read_sentencepiece}
    if kind not in readers:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model = {kind!r}: supported: gpt2 (byte-level BPE), "
            "llama (sentencepiece)"
        )
    tokens, types = _tokens(file)
    # Unused ones only fill up the vocabulary, as [PAD7].
    vocab = {each: idx for idx, each in enumerate(tokens) if types[idx] != _UNUSED}
    backend, adds_bos = readers[kind](file, vocab)
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    around = _around(file, tokens, adds_bos=adds_bos)
    if around is not None:
        backend.post_processor = around
    return backend


def _read_byte_level(file: GgufFile, vocab: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the tokenizer, and whether texts begin with a token unless the metadata says no."""
    pre = file.field("tokenizer.ggml.pre")
    splitting = SPLITTINGS.get(pre)
    if splitting is None:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre = {pre!r}: supported: {', '.join(SPLITTINGS)}"
        )
    if splitting.by_rank:
        _, types = _tokens(file)
        merges = merges_of([each for each, idx in vocab.items() if types[idx] == _NORMAL])
    else:
        merges = [tuple(merge.split(" ")) for merge in file.field("tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.whole_words)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{file.path}: tokenizer.ggml.merges: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if splitting.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_splitters(splitting))
    backend.decoder = decoders.ByteLevel()
    return backend, splitting.adds_bos


def _read_sentencepiece(file: GgufFile, vocab: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    """As _read_byte_level(); characters without a token of their own become those of bytes."""
    tokens, types = _tokens(file)
    scores = file.field("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    normal = {each: scores[idx] for idx, each in enumerate(tokens) if types[idx] == _NORMAL}
    # Sentencepiece joins the two neighbours whose whole has the highest score.
    model = models.BPE(
        vocab=vocab,
        merges=merges_of(sorted(normal, key=normal.__getitem__, reverse=True)),
        unk_token=_token(file, tokens, "unknown_token_id"),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    pieces: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        pieces.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(pieces)
    return backend, True


def read_tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return tokenizer_config.json: the special tokens by name, and the chat templates."""
    tokens, _ = _tokens(file)
    named = {name: _token(file, tokens, key) for name, key in _SPECIAL.items()}
    names = [each for each in file.names if each.startswith(f"{_TEMPLATE}.")]
    templates: Any = file.get(_TEMPLATE)
    if names:
        found = [] if templates is None else [{"name": "default", "template": templates}]
        others = {name.removeprefix(f"{_TEMPLATE}."): file.field(name) for name in names}
        templates = found + [{"name": name, "template": text} for name, text in others.items()]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in named.items() if token is not None},
        **({} if templates is None else {"chat_template": templates}),
    }


def ending_ids(file: GgufFile) -> list[int]:
    """Return the ids that end a generation: of the text, the turn and the message."""
    found = [file.get(f"tokenizer.ggml.{name}") for name in _ENDS]
    return list(dict.fromkeys(idx for idx in found if idx is not None))


def _tokens(file: GgufFile) -> tuple[list[str], list[int]]:
    """Return the vocabulary by id, and each token's type. Raises ConfigError if they disagree."""
    tokens, types = file.field("tokenizer.ggml.tokens"), file.field("tokenizer.ggml.token_type")
    if len(tokens) != len(types):
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} "
            "tokens"
        )
    return tokens, types


def _token(file: GgufFile, tokens: list[str], key: str) -> str | None:
    """Return the text of the token whose id is in the metadata; None: there is no such field."""
    name = f"tokenizer.ggml.{key}"
    idx = file.get(name)
    if idx is not None and not (isinstance(idx, int) and 0 <= idx < len(tokens)):
        raise ConfigError(f"{file.path}: {name} = {idx}: the vocabulary has {len(tokens)} tokens")
    return None if idx is None else tokens[idx]


def _splitters(splitting: _Splitting) -> list[pre_tokenizers.PreTokenizer]:
    found: list[pre_tokenizers.PreTokenizer] = []
    if splitting.by_digit:
        found.append(pre_tokenizers.Digits(individual_digits=True))
    patterns = [*splitting.first, *([] if splitting.pattern is None else [splitting.pattern])]
    found += [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in patterns]
    by_library = splitting.pattern is None
    return [*found, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_library)]


def _around(
    file: GgufFile, tokens: list[str], *, adds_bos: bool
) -> processors.TemplateProcessing | None:
    """Return what puts tokens before and behind a text; None: nothing does."""
    first = _token(file, tokens, "bos_token_id")
    last = _token(file, tokens, "eos_token_id")
    before = [first] if file.get("tokenizer.ggml.add_bos_token", adds_bos) and first else []
    behind = [last] if file.get("tokenizer.ggml.add_eos_token", False) and last else []
    if not before and not behind:
        return None
    return processors.TemplateProcessing(
        single=[*before, "$A", *behind],
        special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(before + behind)],
    )
