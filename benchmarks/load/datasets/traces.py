"""Recorded traffic: BurstGPT's CSV gives lengths and timestamps.

It has no text: prompts are random tokens of the recorded lengths. A replay starts at the first
selected request, and rows keep their recorded distances. BurstGPT (arXiv 2401.17644): Timestamp in
seconds, Request and Response tokens; a row with 0 response tokens is a failed request and is left
out.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.load.contracts import BenchRequest
from benchmarks.load.datasets.lines import DatasetPlace, read_text
from benchmarks.load.datasets.prompts import PromptMaker
from benchmarks.load.datasets.settings import DatasetSettings
from benchmarks.load.datasets.synthetic import completion

_BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


class TraceRow(NamedTuple):
    """One recorded request: its time in seconds and its numbers of tokens."""

    time_s: float
    input_len: int
    output_len: int


def trace_requests(
    settings: DatasetSettings, maker: PromptMaker, rng: np.random.Generator
) -> list[BenchRequest]:
    """Return the requests of the trace that `settings` names, in the order of their times."""
    assert settings.path is not None
    rows = select(read_burstgpt(settings.path, model=settings.burstgpt_model), settings)
    requests = []
    for row in rows:
        passages = [maker.draw(rng, row.input_len)]
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
        raise DatasetPlace(path, "line", 1).error(f"has no column {', '.join(missing)}")
    for fields in reader:
        place = DatasetPlace(path, "line", reader.line_num)
        numbers = [_number(place, name, fields[name]) for name in _BURSTGPT_COLUMNS[::2]]
        output_len = _number(place, "Response tokens", fields["Response tokens"])
        time_s, input_len = numbers
        if model is not None and fields["Model"] != model:
            continue
        if output_len > 0 and input_len > 0:
            yield TraceRow(time_s, int(input_len), int(output_len))


def _number(place: DatasetPlace, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError as error:
        raise place.error(f"{name} must be a number, not {text!r}") from error
    if not 0 <= value < math.inf:
        raise place.error(f"{name} must be a number from 0, not {text!r}")
    return value
