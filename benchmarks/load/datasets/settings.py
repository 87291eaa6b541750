"""The settings of a dataset, and its flags: in vLLM's spelling where vLLM has the flag.

Owns DatasetSettings, the command line's dataset flags, and the checks that need no file.
Knows no file format and sends nothing. Used by every command that sends load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from topspin.errors import ConfigError

NAMES = ("random", "sharegpt", "prefix-repetition", "multi-turn", "burstgpt", "mooncake", "custom")
# Synthetic if no file is named: the others are read from --dataset-path.
SYNTHETIC = ("random", "prefix-repetition", "multi-turn")
DEFAULT_NUM_PROMPTS = 1000
# The same bounds as vllm bench serve for ShareGPT conversations, so that figures are comparable.
SHAREGPT_MAX_PROMPT_LEN = 1024
SHAREGPT_MAX_TOTAL_LEN = 2048


class RangeRatio(NamedTuple):
    """The range of lengths around the given ones: len * (1 - ratio) to len * (1 + ratio)."""

    input: float = 0.0
    output: float = 0.0


@dataclasses.dataclass(frozen=True)
class DatasetSettings:
    """The requests to make. Lengths are in tokens, times in seconds of the trace.

    `num_prompts` None: all of a file, or 1,000 synthetic ones; a shorter file gives fewer. `chat`
    asks for messages instead of prompts, `text` for prompts as text instead of token ids.
    `max_prompt_len` and `max_total_len` (prompt and output) leave out requests.
    """

    name: str = "random"
    path: Path | None = None
    num_prompts: int | None = None
    shuffle: bool = True
    chat: bool = False
    text: bool = False
    vocab_size: int | None = None
    max_prompt_len: int | None = None
    max_total_len: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_prefix_len: int = 0
    random_range_ratio: RangeRatio = dataclasses.field(default_factory=RangeRatio)
    num_prefixes: int = 10
    prefix_len: int = 256
    suffix_len: int = 256
    prefix_output_len: int = 128
    num_users: int = 16
    num_turns: int = 4
    system_len: int = 256
    user_len: int = 64
    turn_output_len: int | None = None
    sharegpt_output_len: int | None = None
    custom_output_len: int | None = None
    burstgpt_model: str | None = None
    mooncake_block_size: int = 512
    trace_start_s: float = 0.0
    trace_duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"dataset {self.name!r} is not known; known: {', '.join(NAMES)}")
        if self.path is None and self.name not in SYNTHETIC:
            raise ConfigError(f"dataset {self.name} is read from a file: give --dataset-path FILE")
        if self.path is not None and self.name in ("random", "prefix-repetition"):
            raise ConfigError(f"dataset {self.name} is made, not read: leave out --dataset-path")
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name in _MAY_BE_ZERO else 1
            if isinstance(value, bool | str | tuple) or value is None or field.name == "path":
                continue
            if not value >= least:
                raise ConfigError(f"{_FLAG_OF[field.name]} {value}: must be at least {least}")
        if self.prefix_len + self.suffix_len == 0 or self.random_shortest_prompt < 1:
            raise ConfigError("prompts need at least 1 token: raise the dataset's prompt lengths")

    @property
    def random_shortest_prompt(self) -> int:
        """The shortest prompt that the random dataset may draw, its fixed prefix included."""
        shortest = int(self.random_input_len * (1 - self.random_range_ratio.input))
        return shortest + self.random_prefix_len

    @property
    def lengths_allowed(self) -> tuple[float, float]:
        """Longest prompt and longest prompt with output; ShareGPT has separate bounds."""
        prompt, total = self.max_prompt_len, self.max_total_len
        if self.name == "sharegpt":
            prompt = SHAREGPT_MAX_PROMPT_LEN if prompt is None else prompt
            total = SHAREGPT_MAX_TOTAL_LEN if total is None else total
        infinity = float("inf")
        return infinity if prompt is None else prompt, infinity if total is None else total

    @classmethod
    def of(cls, parsed: argparse.Namespace | Mapping[str, Any], *, chat: bool) -> DatasetSettings:
        """Read the flags of add_arguments, and the command's --num-prompts if it has one."""
        found = dict(parsed if isinstance(parsed, Mapping) else vars(parsed))
        taken = {
            field: found[_name(flag)]
            for field, flag in _FLAG_OF.items()
            if found.get(_name(flag)) is not None
        }
        _refuse_flags_of_others(str(taken.get("name", cls.name)), taken)
        taken["shuffle"] = not found.get("disable_shuffle", False)
        taken["text"] = found.get("prompt_format") == "text"
        return cls(**taken, chat=chat)


_FLAG_OF = {
    "name": "--dataset-name",
    "path": "--dataset-path",
    "num_prompts": "--num-prompts",
    "vocab_size": "--vocab-size",
    "max_prompt_len": "--max-prompt-len",
    "max_total_len": "--max-total-len",
    "random_input_len": "--random-input-len",
    "random_output_len": "--random-output-len",
    "random_prefix_len": "--random-prefix-len",
    "random_range_ratio": "--random-range-ratio",
    "num_prefixes": "--prefix-repetition-num-prefixes",
    "prefix_len": "--prefix-repetition-prefix-len",
    "suffix_len": "--prefix-repetition-suffix-len",
    "prefix_output_len": "--prefix-repetition-output-len",
    "num_users": "--multi-turn-num-users",
    "num_turns": "--multi-turn-num-turns",
    "system_len": "--multi-turn-system-len",
    "user_len": "--multi-turn-user-len",
    "turn_output_len": "--multi-turn-output-len",
    "sharegpt_output_len": "--sharegpt-output-len",
    "custom_output_len": "--custom-output-len",
    "burstgpt_model": "--burstgpt-model",
    "mooncake_block_size": "--mooncake-block-size",
    "trace_start_s": "--trace-start",
    "trace_duration_s": "--trace-duration",
}
_MAY_BE_ZERO = frozenset(
    {"random_input_len", "random_prefix_len", "prefix_len", "suffix_len", "system_len"}
    | {"trace_start_s", "trace_duration_s"}
)
_HELP = {
    "vocab_size": "ids are drawn from 0 to N-1 (the tokenizer's ordinary tokens)",
    "max_prompt_len": "leave out requests with a longer prompt (sharegpt: 1024)",
    "max_total_len": "leave out requests with a longer prompt and output (sharegpt: 2048)",
    "random_input_len": "tokens of each random prompt (1024)",
    "random_output_len": "output tokens of each random request (128)",
    "random_prefix_len": "tokens that all random prompts begin with, beside the above (0)",
    "num_prefixes": "number of different prefixes (10)",
    "prefix_len": "tokens of each prefix (256)",
    "suffix_len": "tokens after the prefix, new in each prompt (256)",
    "prefix_output_len": "output tokens of each request (128)",
    "num_users": "conversations to make (16)",
    "num_turns": "user turns of each made conversation (4)",
    "system_len": "tokens of the system prompt that all made conversations share (256)",
    "user_len": "tokens of each made user turn (64)",
    "turn_output_len": "longest reply (128; from a file: the length of its replies)",
    "sharegpt_output_len": "output tokens (the length of the file's reply)",
    "custom_output_len": "output tokens (each line's output_tokens)",
    "mooncake_block_size": "tokens that one hash id stands for (512)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the dataset flags; --num-prompts and --seed belong to the command."""
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name",
        type=_dataset_name,
        choices=NAMES,
        default="random",
        metavar="NAME",
        help=f"{', '.join(NAMES)} (%(default)s)",
    )
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="the dataset's file")
    group.add_argument(
        "--disable-shuffle", action="store_true", help="take a file's entries in their order"
    )
    group.add_argument(
        "--prompt-format",
        choices=("ids", "text"),
        default="ids",
        help="how made prompts are sent: token ids, or text of exactly as many (%(default)s)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=_range_ratio,
        metavar="R",
        help='random lengths lie from len*(1-R) to len*(1+R); or {"input": R, "output": R} (0)',
    )
    group.add_argument(
        "--burstgpt-model", metavar="NAME", help="rows of this model only: GPT-4 or ChatGPT (all)"
    )
    for field, text in _HELP.items():
        group.add_argument(_FLAG_OF[field], type=int, metavar="N", help=text)
    group.add_argument(
        "--trace-start", type=float, metavar="S", help="leave out a trace's first S seconds (0)"
    )
    group.add_argument(
        "--trace-duration", type=float, metavar="S", help="replay S seconds of a trace (all)"
    )


def _refuse_flags_of_others(name: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a flag that only another dataset reads."""
    for field in given:
        flag = _FLAG_OF[field]
        owners = [other for other in NAMES if flag.startswith(f"--{other}-")]
        if flag.startswith("--trace-"):
            owners = ["burstgpt", "mooncake"]
        if owners and name not in owners:
            raise ConfigError(f"{flag} is for --dataset-name {' or '.join(owners)}, not {name}")


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _dataset_name(text: str) -> str:
    """Return the dataset's name; accepts vLLM's spelling prefix_repetition as well."""
    return text.replace("_", "-")


def _range_ratio(text: str) -> RangeRatio:
    """Return the ratios in `text`: one number for both, or a JSON object of the two."""
    try:
        value = json.loads(text)
        both = isinstance(value, dict)
        if both and set(value) - {"input", "output"}:
            raise ValueError("keys are input and output")
        ratios: Sequence[Any] = (
            [value.get("input", 0.0), value.get("output", 0.0)] if both else [value] * 2
        )
        ratio = RangeRatio(*(float(number) for number in ratios))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a ratio: {error}") from error
    if not all(0 <= number < 1 for number in ratio):
        raise argparse.ArgumentTypeError(f"{text!r}: a ratio is at least 0 and below 1")
    return ratio
