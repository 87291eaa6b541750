"""The settings of a dataset, which are its flags: in vLLM's spelling where vLLM has the flag.

Owns DatasetSettings and the checks that need no file. Knows no file format and sends nothing. Used
by every command that sends load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.load.flags import check_bounds, flag, flag_of, given, number
from topspin.errors import ConfigError

NAMES = ("random", "sharegpt", "prefix-repetition", "burstgpt", "custom")
# The others are read from --dataset-path.
SYNTHETIC = ("random", "prefix-repetition")
DEFAULT_NUM_PROMPTS = 1000
# The same bounds as vllm bench serve for ShareGPT conversations, so that figures are comparable.
SHAREGPT_MAX_PROMPT_LEN = 1024
SHAREGPT_MAX_TOTAL_LEN = 2048


class RangeRatio(NamedTuple):
    """The range of lengths around the given ones: len * (1 - ratio) to len * (1 + ratio)."""

    input: float = 0.0
    output: float = 0.0


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


def _tokens(name: str, default: int | None, text: str, *, least: int = 1) -> Any:
    return number(name, default, text, kind=int, least=least)


@dataclasses.dataclass(frozen=True)
class DatasetSettings:
    """The requests to make. Lengths are in tokens, times in seconds of the trace.

    `num_prompts` None: all of a file, or 1,000 synthetic ones; a shorter file gives fewer. `chat`
    asks for messages instead of prompts. `max_prompt_len` and `max_total_len` (prompt and output)
    leave out requests.
    """

    name: str = flag(
        "--dataset-name",
        "random",
        f"{', '.join(NAMES)} (random)",
        type=_dataset_name,
        choices=NAMES,
        metavar="NAME",
    )
    path: Path | None = flag(
        "--dataset-path", None, "the dataset's file", type=Path, metavar="FILE"
    )
    num_prompts: int | None = _tokens("--num-prompts", None, "requests (1000, or the file's)")
    in_order: bool = flag(
        "--disable-shuffle", False, "take a file's entries in their order", action="store_true"
    )
    prompt_format: str = flag(
        "--prompt-format",
        "ids",
        "how made prompts are sent: token ids, or text of exactly as many (ids)",
        choices=("ids", "text"),
    )
    chat: bool = False
    vocab_size: int | None = _tokens(
        "--vocab-size", None, "ids are drawn from 0 to N-1 (the tokenizer's ordinary tokens)"
    )
    max_prompt_len: int | None = _tokens(
        "--max-prompt-len", None, "leave out requests with a longer prompt (sharegpt: 1024)"
    )
    max_total_len: int | None = _tokens(
        "--max-total-len", None, "leave out longer prompts with output (sharegpt: 2048)"
    )
    random_input_len: int = _tokens(
        "--random-input-len", 1024, "tokens of each random prompt (1024)", least=0
    )
    random_output_len: int = _tokens(
        "--random-output-len", 128, "output tokens of each random request (128)"
    )
    random_prefix_len: int = _tokens(
        "--random-prefix-len", 0, "tokens that all begin with, beside the above (0)", least=0
    )
    random_range_ratio: RangeRatio = flag(
        "--random-range-ratio",
        RangeRatio(),
        'random lengths lie from len*(1-R) to len*(1+R); or {"input": R, "output": R} (0)',
        type=_range_ratio,
        metavar="R",
    )
    num_prefixes: int = _tokens(
        "--prefix-repetition-num-prefixes", 10, "number of different prefixes (10)"
    )
    prefix_len: int = _tokens(
        "--prefix-repetition-prefix-len", 256, "tokens of each prefix (256)", least=0
    )
    suffix_len: int = _tokens(
        "--prefix-repetition-suffix-len", 256, "new tokens after the prefix (256)", least=0
    )
    prefix_output_len: int = _tokens(
        "--prefix-repetition-output-len", 128, "output tokens of each request (128)"
    )
    sharegpt_output_len: int | None = _tokens(
        "--sharegpt-output-len", None, "output tokens (the length of the file's reply)"
    )
    custom_output_len: int | None = _tokens(
        "--custom-output-len", None, "output tokens (each line's output_tokens)"
    )
    burstgpt_model: str | None = flag(
        "--burstgpt-model", None, "rows of this model only: GPT-4 or ChatGPT (all)", metavar="NAME"
    )
    trace_start_s: float = number(
        "--trace-start", 0.0, "leave out a trace's first N seconds (0)", least=0
    )
    trace_duration_s: float | None = number(
        "--trace-duration", None, "replay N seconds of a trace (all)", above=0
    )

    def __post_init__(self) -> None:
        if self.path is None and self.name not in SYNTHETIC:
            raise ConfigError(f"dataset {self.name} is read from a file: give --dataset-path FILE")
        if self.path is not None and self.name in SYNTHETIC:
            raise ConfigError(f"dataset {self.name} is made, not read: leave out --dataset-path")
        check_bounds(self)
        shortest = int(self.random_input_len * (1 - self.random_range_ratio.input))
        if self.prefix_len + self.suffix_len == 0 or shortest + self.random_prefix_len < 1:
            raise ConfigError("prompts need at least 1 token: raise the dataset's prompt lengths")

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
    def of(cls, parsed: argparse.Namespace, *, chat: bool) -> DatasetSettings:
        """Read the flags; raises ConfigError for a flag that only another dataset reads."""
        found = given(cls, parsed)
        name = found.get("name", cls.name)
        for field in found:
            flag = flag_of(cls, field)
            owners = [other for other in NAMES if flag.startswith(f"--{other}-")]
            if flag.startswith("--trace-"):
                owners = ["burstgpt"]
            if owners and name not in owners:
                raise ConfigError(f"{flag} is for --dataset-name {' or '.join(owners)}, not {name}")
        return cls(**found, chat=chat)
