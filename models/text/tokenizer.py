"""Text to token ids and back, for whole texts and for streams.

Owns a checkpoint's tokenizer (from its files by models.text.tokenizer_files, through the
`tokenizers` library) and IncrementalDetokenizer. Knows no requests and no chat template, imports no
torch; gateways call it. A Tokenizer is immutable and may be shared by threads; a detokenizer
belongs to one stream.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import tokenizers

from models.text.byte_level import byte_of_letter
from models.text.token_bound import Description, token_bound
from models.text.tokenizer_files import effective_tokenizer, read_special_tokens
from models.text.tokenizer_names import TOKENIZER_FILE
from topspin.errors import ConfigError, InvalidRequest

# Decoding so many takes about a millisecond.
LONG_IDS = 1024


class _Alphabet(NamedTuple):
    """The encoding of bytes in a token's string.

    byte_of: byte-level tokenizers' character -> byte table, None for piece tokenizers,
    which write a space as `space` and, with byte_fallback, a lone byte as `<0xAB>`.
    """

    byte_of: Mapping[str, int] | None
    space: str | None
    has_byte_fallback: bool


class Tokenizer:
    """A checkpoint's tokenizer; its results equal transformers.AutoTokenizer's."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, special_tokens: Mapping[str, str], source: str
    ) -> None:
        """Wrap `backend`. Raises ConfigError for an unsupported kind of decoder."""
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        description = msgspec.json.decode(backend.to_str(), type=Description)
        self._alphabet = _alphabet(description, source=source)
        self._bound = token_bound(backend, description, byte_of=self._alphabet.byte_of)
        # The library's own mark of a token can differ from what it skips.
        self._special_ids = frozenset(
            idx
            for idx in backend.get_added_tokens_decoder()
            if backend.decode([idx], skip_special_tokens=True)
            != backend.decode([idx], skip_special_tokens=False)
        )
        self._bytes_of: dict[int, bytes] = {}
        self.special_tokens: Mapping[str, str] = dict(special_tokens)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read the tokenizer's files in `path`, of which tokenizer.json is needed.

        Raises ConfigError naming the file that is missing or cannot be used.
        """
        backend = effective_tokenizer(path)
        special_tokens = read_special_tokens(path)
        return cls(backend, special_tokens=special_tokens, source=str(Path(path) / TOKENIZER_FILE))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's vocabulary may be padded beyond."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that decode(skip_special_tokens=True) leaves out."""
        return self._special_ids

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token, if the checkpoint names one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, if the checkpoint names one."""
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token, if the checkpoint names one."""
        return self._special_id("pad_token")

    @property
    def is_byte_level(self) -> bool:
        """Whether every token stands for the same bytes in any context."""
        return self._alphabet.byte_of is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`; with add_special_tokens also those around it (e.g. BOS).

        Special tokens written out in `text` become their ids, as chat templates need. Releases the
        GIL. Raises InvalidRequest for lone surrogates, which no tokenizer has.
        """
        _utf8(text)
        # Of the library's calls only those for batches release the GIL.
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`, without tokenising it.

        Raises InvalidRequest for lone surrogates.
        """
        data = _utf8(text)
        return 0 if self._bound is None else self._bound.fewest_tokens(data)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`; ids without a token count as empty.

        Releases the GIL for many ids: only the library's calls for batches do.
        """
        if len(ids) > LONG_IDS:
            texts: list[str] = self._backend.decode_batch(
                [list(ids)], skip_special_tokens=skip_special_tokens
            )
            return texts[0]
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """Return the id of the token written exactly `token` in the vocabulary."""
        idx: int | None = self._backend.token_to_id(token)
        return idx

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, space included; b"" if there is none."""
        known = self._bytes_of.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = b"" if token is None else _to_bytes(token, self._alphabet)
            self._bytes_of[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """Return one token as text for logprobs; an incomplete character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def vocabulary_entry(self, token_id: int) -> str:
        """Return one token as the vocabulary writes it (`Ġhello`); empty if there is none."""
        return self._backend.id_to_token(token_id) or ""

    def is_lone_byte(self, token_id: int) -> bool:
        """Return whether the token is a byte-fallback byte such as `<0xE4>`."""
        if not self._alphabet.has_byte_fallback:
            return False
        token = self._backend.id_to_token(token_id)
        return token is not None and _lone_byte(token) is not None

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)


class _TextStream(Protocol):
    """Turns one stream's tokens into text, without the end that later tokens may change."""

    def push(self, token_ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """One stream's text, piece by piece, without incomplete characters.

    The joined results of push and the final flush equal the text after the prompt's when the
    prompt and the generated ids are decoded together; for a prompt that ends inside a
    character, the completed character is part of the generated text. The time of a push is
    proportional to its tokens, not to the text streamed before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool,
        shown_tokens: Collection[str] = (),
    ) -> None:
        """Start after `prompt_ids`, which are context only and never returned.

        The special tokens `shown_tokens` are not skipped.
        """
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        skipped -= {tokenizer.token_id(token) for token in shown_tokens}
        self._stream: _TextStream = (
            _ByteStream(tokenizer, prompt_ids, skipped)
            if tokenizer.is_byte_level
            else _PieceStream(tokenizer, prompt_ids, skipped)
        )

    def push(self, token_ids: Iterable[int]) -> str:
        """Add generated tokens and return the text that is now certain."""
        return self._stream.push(token_ids)

    def flush(self) -> str:
        """Return the text held back, an unfinished character as U+FFFD; call once, at the end."""
        return self._stream.flush()


def text_before(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool
) -> str:
    """Return the text that an IncrementalDetokenizer with these arguments continues.

    It has the prompt's special tokens. A character that the prompt leaves unfinished is not in it:
    the stream returns that, whatever it becomes.
    """
    text = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    stream = IncrementalDetokenizer(
        tokenizer, prompt_ids=prompt_ids, skip_special_tokens=skip_special_tokens
    )
    return text.removesuffix(stream.flush())


class _ByteStream:
    """A byte-level tokenizer's stream: its text is its tokens' bytes, decoded as UTF-8."""

    # The longest UTF-8 sequence has 4 bytes: an unfinished one is within the last 3.
    _CONTEXT_BYTES = 3

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        context = b""
        for token_id in reversed(prompt_ids):
            if len(context) >= self._CONTEXT_BYTES:
                break
            context = self._bytes(token_id) + context
        self._utf8.decode(context)

    def push(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(self._bytes(token_id) for token_id in token_ids))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)


class _PieceStream:
    """A SentencePiece-like tokenizer's stream, decoded in a window that starts at an anchor token.

    Such a decoder treats the first token of a text (its leading space) and a whole run of byte
    tokens specially: one bad byte turns its entire run into U+FFFD. So the window starts at a token
    that was already returned, and a run is held back until it ends.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._anchor: list[int] = []
        self._pending: list[int] = []
        run: list[int] = []
        for token_id in reversed(prompt_ids):
            if not self._counts(token_id):
                continue
            if not tokenizer.is_lone_byte(token_id):
                self._anchor = [token_id]
                break
            run.append(token_id)
        run.reverse()
        self._anchor_text = self._decode(self._anchor)
        text = self._decode(self._anchor + run)
        if text.endswith("\ufffd"):
            self._pending = run
        else:
            self._anchor, self._anchor_text = self._anchor + run, text

    def push(self, token_ids: Iterable[int]) -> str:
        self._pending.extend(token_id for token_id in token_ids if self._counts(token_id))
        certain = len(self._pending)
        while certain and self._tokenizer.is_lone_byte(self._pending[certain - 1]):
            certain -= 1
        return self._emit(certain)

    def flush(self) -> str:
        return self._emit(len(self._pending))

    def _emit(self, num_tokens: int) -> str:
        """Return the text of the first `num_tokens` pending tokens; the last is the new anchor."""
        if not num_tokens:
            return ""
        tokens, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        text = self._decode(self._anchor + tokens)
        new_text = text[len(self._anchor_text) :]
        self._anchor = [tokens[-1]]
        self._anchor_text = self._decode(self._anchor)
        return new_text

    def _counts(self, token_id: int) -> bool:
        return token_id not in self._skipped and bool(self._tokenizer.token_bytes(token_id))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"text is not valid Unicode: {error}") from error


def _alphabet(description: Description, *, source: str) -> _Alphabet:
    """Return the encoding of bytes in tokens, from the decoder in a tokenizer's description."""
    decoder = description.decoder or {"type": None}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Alphabet(byte_of=byte_of_letter(), space=None, has_byte_fallback=False)
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise ConfigError(
            f"{source}: decoder {kinds} is not supported; supported: ByteLevel, and sequences "
            "of Replace, ByteFallback, Fuse, Strip and Metaspace"
        )
    if any(step["type"] == "Strip" and step["stop"] for step in steps):
        raise ConfigError(f"{source}: decoder Strip with stop > 0 cannot be streamed")
    spaces = [space for step in steps if (space := _space_symbol(step)) is not None]
    return _Alphabet(
        byte_of=None,
        space=spaces[0] if spaces else None,
        has_byte_fallback="ByteFallback" in kinds,
    )


def _space_symbol(step: Mapping[str, Any]) -> str | None:
    """Return the string that a decoder step turns into a space."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    if step["type"] == "Replace" and step["content"] == " ":
        symbol = step["pattern"].get("String")
        return None if symbol is None else str(symbol)
    return None


def _to_bytes(token: str, alphabet: _Alphabet) -> bytes:
    if alphabet.byte_of is not None:
        # A token with a character outside the table (an added one) stands for itself.
        values = [alphabet.byte_of.get(character) for character in token]
        known = [value for value in values if value is not None]
        return bytes(known) if len(known) == len(values) else token.encode("utf-8")
    if alphabet.has_byte_fallback and (byte := _lone_byte(token)) is not None:
        return bytes([byte])
    text = token if alphabet.space is None else token.replace(alphabet.space, " ")
    return text.encode("utf-8")


def _lone_byte(token: str) -> int | None:
    """Return the byte that a token of the form `<0xAB>` stands for."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None
