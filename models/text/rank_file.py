"""A vocabulary as tiktoken writes it: byte strings by rank, made a tokenizer of the library.

Owns the file's format, the families' patterns, and the ids behind the ranks,
which are special tokens. Of two neighbours those are joined first whose joined bytes have the
lowest rank: so every way to cut a token into two tokens is a merge, in the order of ranks. Knows no
other file; called by tokenizer_files.py.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from models.text.byte_level import byte_of_letter
from topspin.errors import ConfigError

NUM_RESERVED: Final = 256
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS: Final[Mapping[str, str]] = {
    "kimi_k2": "|".join(
        (
            r"[\p{Han}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
}
"""By `model_type`, how text is cut before bytes are joined; classes of the same name in other
families have other patterns."""


def rank_tokenizer(
    file: Path, model_type: str, named: Mapping[int, AddedToken]
) -> tokenizers.Tokenizer:
    """Return the tokenizer of `file`, whose NUM_RESERVED ids behind the ranks are special.

    `named` are those with a name of their own, by id. Raises ConfigError for another family than
    those of PATTERNS, and for lines that are no ranks.
    """
    if model_type not in PATTERNS:
        raise ConfigError(
            f"{file}: ranks are read of the model_type {', '.join(PATTERNS)}, not of "
            f"{model_type}; give the checkpoint a tokenizer.json"
        )
    ranks = _read(file)
    letter_of = {byte: letter for letter, byte in byte_of_letter().items()}
    spelt = {token: "".join(map(letter_of.__getitem__, token)) for token in ranks}
    vocab = {spelt[token]: rank for token, rank in ranks.items()}
    model = models.BPE(vocab=vocab, merges=merges_of([*vocab]), ignore_merges=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[model_type]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    first = len(ranks)
    names = {idx: f"<|reserved_token_{idx}|>" for idx in range(first, first + NUM_RESERVED)}
    names |= {idx: token.content for idx, token in named.items() if idx in names}
    backend.add_special_tokens([AddedToken(name, special=True) for name in names.values()])
    return backend


def merges_of(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Return BPE's merges, in the order of `tokens`: every two of them that are one together."""
    known = set(tokens)
    return [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _read(file: Path) -> dict[bytes, int]:
    """Return the rank of each byte string, ascending: 0, 1, ...; every single byte has one."""
    found: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines()):
        token, _, rank = line.partition(b" ")
        try:
            found[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(f"{file}: line {number + 1} is no token and its rank") from error
    if list(found.values()) != list(range(len(found))):
        raise ConfigError(f"{file}: the ranks are not 0, 1, ... in order")
    if any(bytes([byte]) not in found for byte in range(256)):
        raise ConfigError(f"{file}: not every byte is a token")
    return found
