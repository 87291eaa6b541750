"""The checked flags of `topspin bench retrieval`, which all of its parts read.

Owns the flags, their checks and the text. Knows no part. Called by benchmarks.retrieval.command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.experiment import check_positive, say
from benchmarks.load.arguments import numbers
from benchmarks.local_model import BLOCK_SIZE
from benchmarks.servers.topspin import add_server_arguments
from kernels.contracts import SEGMENT_KEYS
from models.description.config import load_model_config
from models.sources.hub import resolve_model
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError, TopspinError
from topspin.plan.retrieval import MIN_TOKENS

DENSE: Final = "dense"
MOST_QUESTIONS: Final = 56
"""About one text: it has a fact for each."""
PARTS: Final = ("quality", "tasks", "speed")
TEXTS: Final = ("README.md", "CONTRIBUTING.md", "docs/api.md")
# Flags of `topspin serve` that the benchmark sets.
_OWNED: Final = ("--kv-retrieval-tokens", "--port", "--host")
# Keys behind the last coded one that are attended to anyway.
_UNCODED_KEYS: Final = 64


@dataclass(frozen=True)
class RetrievalFlags:
    """The checked request of the command line; `flags` are those of `topspin serve`."""

    args: argparse.Namespace
    flags: list[str]
    path: Path
    parts: list[str]
    contexts: list[int]
    budgets: list[int]
    text: str
    tokens: list[int]
    """The first ones of the text: as many as --tokens, or as the model can read."""

    def say(self, line: str) -> None:
        """Print a line of progress, unless none is wanted."""
        if not self.args.quiet:
            say(line)

    @classmethod
    def read(cls, parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> RetrievalFlags:
        """Read the flags; make all checks that need no model in memory."""
        args, flags = _add_flags(parser).parse_known_args(argv)
        for flag in flags:
            if flag.partition("=")[0] in _OWNED:
                raise ConfigError(f"{flag}: the benchmark sets it itself")
        check_positive(args, ("tokens", "texts", "questions", "steps", "rounds", "start_timeout"))
        if args.questions > MOST_QUESTIONS:
            raise ConfigError(
                f"--questions {args.questions}: a text has facts for {MOST_QUESTIONS}"
            )
        if args.positions < 2:
            raise ConfigError(f"--positions is {args.positions}; noise is told of 2 or more")
        asked = args.parts.split(",")
        if unknown := set(asked) - set(PARTS):
            raise ConfigError(
                f"--parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}"
            )
        contexts, budgets = _whole("--contexts", args.contexts), _whole("--budgets", args.budgets)
        if min(budgets) < MIN_TOKENS:
            raise ConfigError(f"--budgets {min(budgets)}: at least {MIN_TOKENS}")
        least = max(SEGMENT_KEYS, max(budgets) + _UNCODED_KEYS + 1)
        for context in contexts:
            if context < least or context % BLOCK_SIZE:
                raise ConfigError(
                    f"--contexts {context}: must be {least} or more, for something to select, and "
                    f"whole blocks of {BLOCK_SIZE}"
                )
        path = resolve_model(args.model)
        config = load_model_config(path)
        if config.latent is not None:
            raise ConfigError(f"{path}: latents, which are the keys of all heads, are not coded")
        text = _read(args.text)
        ids = Tokenizer.from_directory(path).encode(text, add_special_tokens=True)
        length = min(args.tokens, config.context_length) // BLOCK_SIZE * BLOCK_SIZE
        if len(ids) < length:
            raise ConfigError(
                f"the text has {len(ids)} tokens, fewer than {length}; give a longer --text, or "
                "fewer --tokens"
            )
        parts = [part for part in PARTS if part in asked]
        return cls(args, flags, path, parts, contexts, budgets, text, ids[:length])


def _whole(flag: str, text: str) -> list[int]:
    return [int(each) for each in numbers(flag, text, whole=True)]


def _read(file: Path | None) -> str:
    """Return the text of `file`; None: the repository's own texts, one behind the other."""
    root = Path(__file__).parents[2]
    files = [file] if file is not None else [root / name for name in TEXTS]
    try:
        return "\n\n".join(each.read_text(encoding="utf-8") for each in files)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; give a file as --text") from error


def _add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_server_arguments(parser)
    parser.add_argument("--parts", default=",".join(PARTS), metavar="P,P", help="(%(default)s)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="(this repository's texts)")
    for name, default, text in (
        ("--tokens", 8192, "of the text, at most what the model can read"),
        ("--positions", 32, "queries a text"),
        ("--texts", 2, "a task"),
        ("--questions", 20, "about each text"),
        ("--steps", 64, "timed"),
        ("--seed", 0, ""),
    ):
        about = f"{text} (%(default)s)".lstrip()
        parser.add_argument(name, type=int, default=default, metavar="N", help=about)
    contexts = "2048,4096,6144,8192,16384,32768,65536"
    for name, lengths, text in (
        ("--contexts", contexts, "lengths of timed sequences"),
        ("--budgets", "512,1024", "keys in timed steps"),
    ):
        about = f"{text} (%(default)s)"
        parser.add_argument(name, default=lengths, metavar="N,N", help=about)
    return parser


class NothingSelected(TopspinError):
    """Retrieval was asked for, and no layer selected keys."""

    code = "nothing_selected"
