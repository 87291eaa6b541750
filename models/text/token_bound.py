"""A lower bound of a text's number of tokens, from its size only.

Owns the bound, by which text that cannot fit is refused before it is tokenised, and the parts
of tokenizer.json that it is derived from. Knows no limit and no request; called by
models.text.tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import tokenizers

# Composition (NFC) shortens text, in UTF-8 by a factor of 3.5 at most: U+1FBE U+0308 U+0301 are 7
# bytes, composed to the 2 of U+0390.
_SHRINKS_BY = {"NFC": 4, "Prepend": 1}
_KEEPING_SPLITTERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})


class ModelPart(msgspec.Struct, frozen=True):
    """The model part of tokenizer.json, without the vocabulary."""

    type: str
    byte_fallback: bool | None = None


class Description(msgspec.Struct, frozen=True):
    """The steps in tokenizer.json; the vocabulary is skipped, since it is long."""

    model: ModelPart
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] = []


class TokenBound(NamedTuple):
    """A token stands for `most_bytes` of UTF-8 at most; bytes in `dropped` get no token."""

    most_bytes: int
    dropped: bytes

    def fewest_tokens(self, text: bytes) -> int:
        """Return a lower bound of the number of tokens of `text`."""
        num_bytes = len(text.translate(None, self.dropped)) if self.dropped else len(text)
        return -(-num_bytes // self.most_bytes)


def token_bound(
    backend: tokenizers.Tokenizer,
    description: Description,
    *,
    byte_of: Mapping[str, int] | None,
) -> TokenBound | None:
    """Return the bound of a tokenizer; `byte_of` is the table of a byte-level one.

    None if there is no such bound: the tokenizer may leave out text (spaces beside special tokens,
    unknown characters) or shorten it by an unknown factor.
    """
    added = description.added_tokens
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    splitters = list(_steps(description.pre_tokenizer, "pretokenizers"))
    for step in splitters:
        if step["type"] not in _KEEPING_SPLITTERS or step.get("behavior") == "Removed":
            return None
    shrinks_by = 1
    for step in _steps(description.normalizer, "normalizers"):
        factor = 1 if _replaces_by_longer(step) else _SHRINKS_BY.get(step["type"])
        if factor is None:
            return None
        shrinks_by *= factor
    vocabulary = backend.get_vocab(with_added_tokens=False)
    model = description.model
    dropped = b""
    if byte_of is not None:
        if model.type != "BPE" or all(step["type"] != "ByteLevel" for step in splitters):
            return None
        dropped = bytes(byte for character, byte in byte_of.items() if character not in vocabulary)
        if dropped and shrinks_by > 1:
            return None
        longest = max(map(len, vocabulary), default=0)  # one character per byte
    else:
        has_every_byte = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        if not (model.byte_fallback and has_every_byte):
            return None
        longest = max(len(token.encode()) for token in vocabulary)
    longest_added = max((len(token["content"].encode()) for token in added), default=1)
    return TokenBound(max(longest, longest_added) * shrinks_by, dropped)


def _steps(step: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normaliser or pre-tokeniser, sequences unfolded."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step[name]:
        yield from _steps(part, name)


def _replaces_by_longer(step: dict[str, Any]) -> bool:
    if step["type"] != "Replace" or "String" not in step["pattern"]:
        return False
    return len(step["content"].encode()) >= len(step["pattern"]["String"].encode()) > 0
