"""A node's compiled grammars: the checkpoint's vocabulary for llguidance, and a bounded cache.

Owns the tokenizer, the cache and the thread that compiles what the scheduler announces, so that
no step waits for that. A grammar that is not in the cache when a sequence needs it (it came
with a replay, or was displaced) is compiled at once. Knows no sequences (constraints.py) and no
messages: worker.py reports what is compiled.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from topspin.errors import ConfigError, InvalidRequest
from topspin.grammars import grammar_key, limits, reason_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED: Final = 256
MAX_COMPILED_BYTES: Final = 8 * 1024 * 1024
"""Of the grammars' texts; what they are compiled to is some 20 times as large."""
_NICENESS: Final = 10

_log = logging.getLogger("attention")


class CompiledGrammar(NamedTuple):
    """The end of a compilation by `start`; `error`: why it failed, or nothing."""

    key: str
    error: str


class Grammars:
    """The grammars that sequences of one node follow.

    Invariant: a cached matcher has consumed nothing and has no error; it is only copied.
    """

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Begin to read the tokenizer of the checkpoint in `directory`, whose logits have
        `vocab_size` tokens.
        """
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammars", initializer=_be_nice)
        # Now: it holds the interpreter's lock for a fifth of a second, or longer.
        self._tokenizer: Future[LLTokenizer] = self._threads.submit(
            _read_tokenizer, directory, vocab_size, eos_token_ids
        )
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()
        self._size_bytes = 0
        self._under_way: dict[str, Future[str]] = {}

    @property
    def num_words(self) -> int:
        """Return how many i32 a matcher's mask has; 0 without a tokenizer, and so without any."""
        if self._tokenizer.exception() is not None:
            return 0
        return -(-self._tokenizer.result().vocab_size // 32)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher that has consumed nothing; raises InvalidRequest with the reason."""
        key = grammar_key(grammar)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found[0].deep_copy()
        return self._compile(key, grammar).deep_copy()

    def start(self, key: str, grammar: str) -> None:
        """Compile a grammar in the background, unless that is done; `take_compiled` tells."""
        if key not in self._under_way:
            self._under_way[key] = self._threads.submit(self._try, key, grammar)

    @property
    def is_compiling(self) -> bool:
        """Return whether take_compiled() has more to say."""
        return bool(self._under_way)

    def take_compiled(self) -> list[CompiledGrammar]:
        """Return the compilations that have ended since the last call; never waits."""
        ended = [key for key, each in self._under_way.items() if each.done()]
        return [CompiledGrammar(key, self._under_way.pop(key).result()) for key in ended]

    def close(self) -> None:
        """End the thread, once it has compiled the grammar under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _try(self, key: str, grammar: str) -> str:
        """Compile unless that is done; return why it failed, or nothing."""
        with self._lock:
            if key in self._compiled:
                return ""
        try:
            self._compile(key, grammar)
        except InvalidRequest as error:
            return str(error)
        return ""

    def _compile(self, key: str, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        try:
            tokenizer = self._tokenizer.result()
        except ConfigError as error:
            raise InvalidRequest(f"grammars are not served: {error}") from error
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one takes longest
        if matcher.is_error():
            raise InvalidRequest(f"the grammar is refused: {reason_of(matcher.get_error())}")
        with self._lock:
            _, size = self._compiled.pop(key, (None, 0))
            self._compiled[key] = matcher, len(grammar)
            self._size_bytes += len(grammar) - size
            while len(self._compiled) > MAX_COMPILED or (
                self._size_bytes > MAX_COMPILED_BYTES and len(self._compiled) > 1
            ):
                self._size_bytes -= self._compiled.popitem(last=False)[1][1]
        return matcher


def _read_tokenizer(
    directory: Path, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> LLTokenizer:
    """Return the vocabulary; raises ConfigError, which clients may read, if it cannot be used."""
    file = directory / "tokenizer.json"
    if not file.exists():
        raise ConfigError("the checkpoint has no tokenizer.json")
    if not eos_token_ids:
        raise ConfigError("the checkpoint names no token that ends a text")
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

    try:
        own_size = Tokenizer.from_file(str(file)).get_vocab_size(with_added_tokens=True)
        size = max(vocab_size, own_size)
        return LLTokenizer(str(file), n_vocab=size, eos_token=list(eos_token_ids))
    except Exception as error:  # the libraries raise bare Exception
        _log.error("%s: %s", file, error)
        raise ConfigError("the checkpoint's tokenizer.json cannot be used for them") from error


def _be_nice() -> None:
    # Of this thread only: it may share its core with the one that runs the steps.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
