"""Prompts of an exact number of tokens, as token ids or as text.

Owns the set of token ids to draw from, and the conversion of ids to prompts. Knows no dataset. A
passage is a list of token ids; equal passages at the beginning of two prompts make equal prefixes,
as ids and as text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError

# Text is made of this many words at most: enough variety, and each must be tried out.
MAX_WORDS = 4096


class PromptMaker:
    """Draws passages of random tokens and turns passages into prompts.

    As ids every ordinary token may be drawn. As text only tokens that are a whole lower-case word
    after a space may be drawn, because tokenizers split there: such passages, joined in any order,
    encode to exactly as many tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, vocab_size: int | None, as_text: bool
    ) -> None:
        """Find the ids to draw from.

        Raises ConfigError if there is neither a tokenizer nor `vocab_size`, if text is wanted
        without a tokenizer, or if the tokenizer has too few whole words for text.
        """
        if as_text and tokenizer is None:
            raise ConfigError(
                "text of an exact number of tokens needs the tokenizer: give --tokenizer DIRECTORY"
            )
        self._tokenizer = tokenizer if as_text else None
        if tokenizer is None:
            if vocab_size is None:
                raise ConfigError(
                    "random token ids need --tokenizer DIRECTORY, or --vocab-size N to draw from"
                )
            self._ids = np.arange(vocab_size)
        else:
            self._ids = np.array(
                _words(tokenizer, vocab_size) if as_text else _ordinary(tokenizer, vocab_size)
            )
        if len(self._ids) < 2:
            raise ConfigError("the tokenizer has no ordinary tokens to make prompts of")

    def draw(self, rng: np.random.Generator, length: int) -> list[int]:
        """Return a passage of `length` tokens."""
        drawn: list[int] = self._ids[rng.integers(0, len(self._ids), size=length)].tolist()
        return drawn

    def prompt(self, passages: Sequence[Sequence[int]]) -> str | list[int]:
        """Return the passages, one after the other, as ids or as text of as many tokens."""
        ids = [token_id for passage in passages for token_id in passage]
        return ids if self._tokenizer is None else self.text(ids)

    def text(self, ids: Sequence[int]) -> str:
        """Return drawn ids as text that encodes to len(ids) tokens, special ones apart."""
        assert self._tokenizer is not None, "this maker draws ids, not text"
        # Chat templates strip a message, so a text that begins with a space would change.
        text = self._tokenizer.decode(ids, skip_special_tokens=False).lstrip(" ")
        found = len(self._tokenizer.encode(text, add_special_tokens=False))
        if found != len(ids):
            raise ConfigError(
                f"this tokenizer encodes a text made of {len(ids)} of its words to {found} tokens; "
                "send token ids (--prompt-format ids, on /v1/completions)"
            )
        return text


def _ordinary(tokenizer: Tokenizer, vocab_size: int | None) -> list[int]:
    """Return the ids of text tokens: neither special nor unused."""
    end = tokenizer.vocab_size if vocab_size is None else min(vocab_size, tokenizer.vocab_size)
    special = tokenizer.special_ids
    return [idx for idx in range(end) if idx not in special and tokenizer.token_bytes(idx)]


def _words(tokenizer: Tokenizer, vocab_size: int | None) -> list[int]:
    """Return ids of whole words that stay one token at the beginning and after another."""
    found = [idx for idx in _ordinary(tokenizer, vocab_size) if _is_word(tokenizer, idx)]
    step = max(1, len(found) // MAX_WORDS)
    return [idx for idx in found[::step] if _stays_one_token(tokenizer, idx)]


def _is_word(tokenizer: Tokenizer, token_id: int) -> bool:
    token = tokenizer.token_bytes(token_id)
    word = token[1:]
    return token[:1] == b" " and len(word) > 1 and word.isalpha() and word.islower()


def _stays_one_token(tokenizer: Tokenizer, token_id: int) -> bool:
    text = tokenizer.decode([token_id, token_id], skip_special_tokens=False).lstrip(" ")
    first = tokenizer.encode(text.split(" ")[0], add_special_tokens=False)
    both = tokenizer.encode(text, add_special_tokens=False)
    return len(first) == 1 and len(both) == 2 and both[1] == token_id
