"""Recorded traffic: BurstGPT's CSV and Mooncake's JSONL give lengths and timestamps.

Neither has text: prompts are random tokens of the recorded lengths. A replay starts at the first
selected request, and rows keep their recorded distances.

BurstGPT (arXiv 2401.17644): Timestamp in seconds, Request and Response tokens; a row with 0
response tokens is a failed request and is left out. Mooncake (arXiv 2407.00079): timestamp in ms,
input_length, output_length, hash_ids; a hash id identifies a block of 512 tokens and all tokens
before it, the last block may be shorter, and requests that share leading ids share that prefix of
tokens.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.load.contracts import BenchRequest
from benchmarks.load.datasets.lines import Entry, Place, jsonl_entries, read_text
from benchmarks.load.datasets.prompts import PromptMaker
from benchmarks.load.datasets.settings import DatasetSettings
from benchmarks.load.datasets.synthetic import completion
from topspin.errors import ConfigError

_BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


class TraceRow(NamedTuple):
    """One recorded request: its time in seconds and its numbers of tokens; hash_ids if recorded."""

    time_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] | None = None


def trace_requests(
    settings: DatasetSettings, maker: PromptMaker, rng: np.random.Generator
) -> list[BenchRequest]:
    """Return the requests of the trace that `settings` names, in the order of their times."""
    assert settings.path is not None
    if settings.name == "burstgpt":
        rows = select(read_burstgpt(settings.path, model=settings.burstgpt_model), settings)
    else:
        block_size = settings.mooncake_block_size
        rows = select(read_mooncake(settings.path, block_size=block_size), settings)
    if not rows:
        raise ConfigError(f"{settings.path}: no request of the trace is within the given limits")
    # One draw, so that a block's tokens depend on the seed and its id, not on its row.
    blocks = Blocks(maker, seed=int(rng.integers(2**63)), block_size=settings.mooncake_block_size)
    requests = []
    for row in rows:
        passages = [maker.draw(rng, row.input_len)] if row.hash_ids is None else blocks.of(row)
        request = completion(maker, passages, row.output_len, chat=settings.chat)
        requests.append(dataclasses.replace(request, arrival_s=row.time_s - rows[0].time_s))
    return requests


def select(rows: Iterator[TraceRow], settings: DatasetSettings) -> list[TraceRow]:
    """Return at most num_prompts rows within the time window and the bounds of length."""
    max_prompt_len, max_total_len = settings.lengths_allowed
    ordered = sorted(rows, key=lambda row: row.time_s)
    if not ordered:
        return []
    start_s = ordered[0].time_s + settings.trace_start_s
    duration_s = settings.trace_duration_s
    end_s = math.inf if duration_s is None else start_s + duration_s
    found = [
        row
        for row in ordered
        if start_s <= row.time_s < end_s
        and row.input_len <= max_prompt_len
        and row.input_len + row.output_len <= max_total_len
    ]
    return found[: settings.num_prompts]


def read_burstgpt(path: Path, *, model: str | None) -> Iterator[TraceRow]:
    """Yield the rows of `model` (None: all) that did not fail; columns are found by name.

    Releases differ in whether they have Session ID and Elapsed time; neither is needed.
    """
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    missing = [name for name in _BURSTGPT_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise Place(path, "line", 1).error(f"has no column {', '.join(missing)}")
    for fields in reader:
        place = Place(path, "line", reader.line_num)
        numbers = [_number(place, name, fields[name]) for name in _BURSTGPT_COLUMNS[::2]]
        output_len = _number(place, "Response tokens", fields["Response tokens"])
        time_s, input_len = numbers
        if model is not None and fields["Model"] != model:
            continue
        if output_len > 0 and input_len > 0:
            yield TraceRow(time_s, int(input_len), int(output_len))


def _number(place: Place, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError as error:
        raise place.error(f"{name} must be a number, not {text!r}") from error
    if not 0 <= value < math.inf:
        raise place.error(f"{name} must be a number from 0, not {text!r}")
    return value


def read_mooncake(path: Path, *, block_size: int) -> Iterator[TraceRow]:
    """Yield the rows of a Mooncake trace; hash_ids may be missing in all of them or in some."""
    for entry in jsonl_entries(path):
        time_ms = entry.number("timestamp", least=0)
        input_len = entry.whole("input_length", least=1)
        output_len = entry.whole("output_length", least=1)
        hash_ids = None
        if entry.fields.get("hash_ids") is not None:
            hash_ids = _hash_ids(entry, input_len, block_size)
        yield TraceRow(time_ms / 1000, input_len, output_len, hash_ids)


def _hash_ids(entry: Entry, input_len: int, block_size: int) -> tuple[int, ...]:
    found = entry.ids("hash_ids")
    needed = math.ceil(input_len / block_size)
    if len(found) != needed:
        raise entry.place.error(
            f"{len(found)} hash_ids, but input_length {input_len} is {needed} blocks of "
            f"{block_size} tokens (--mooncake-block-size)"
        )
    return tuple(found)


class Blocks:
    """The tokens of hash ids: equal ids give equal tokens, in any order of calls."""

    def __init__(self, maker: PromptMaker, *, seed: int, block_size: int) -> None:
        self._maker = maker
        self._seed = seed
        self._block_size = block_size
        self._known: dict[int, list[int]] = {}

    def of(self, row: TraceRow) -> list[Sequence[int]]:
        """Return the row's prompt block by block, the last one cut to the prompt's length."""
        assert row.hash_ids is not None
        passages: list[Sequence[int]] = [self._block(hash_id) for hash_id in row.hash_ids]
        last_len = row.input_len - self._block_size * (len(passages) - 1)
        return [*passages[:-1], passages[-1][:last_len]]

    def _block(self, hash_id: int) -> list[int]:
        block = self._known.get(hash_id)
        if block is None:
            block = self._maker.draw(np.random.default_rng([self._seed, hash_id]), self._block_size)
            self._known[hash_id] = block
        return block
