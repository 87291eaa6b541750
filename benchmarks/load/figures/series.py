"""The course of a run over time: requests at the server, tokens per second, decode windows.

Pure functions from records to numbers, for pictures and comparisons. Times are seconds from
the run's start. Knows no picture and no percentile (benchmarks.load.figures.metrics has those).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.load.contracts import LoadRun, MeasuredRequest

Floats = npt.NDArray[np.float64]


class Curve(NamedTuple):
    """A step curve: from times_s[i] on the value is values[i], until the next time."""

    times_s: Floats
    values: Floats


def concurrency(records: Sequence[MeasuredRequest]) -> Curve:
    """Return the number of requests at the server (sent, not ended) over time."""
    spans = [(r.sent_s, r.end_s) for r in records if r.sent_s is not None and r.end_s is not None]
    changes: dict[float, int] = {0.0: 0}
    for sent_s, end_s in spans:
        changes[sent_s] = changes.get(sent_s, 0) + 1
        changes[end_s] = changes.get(end_s, 0) - 1
    times = sorted(changes)
    return Curve(
        np.array(times, dtype=np.float64),
        np.cumsum([changes[time] for time in times]).astype(np.float64),
    )


def throughput(run: LoadRun, *, bins: int = 60) -> Curve:
    """Return output tokens per second in equal bins from the start to the end of the run."""
    times, tokens = _arrivals(run.records)
    edges = np.linspace(0.0, max(run.duration_s, 1e-9), bins + 1)
    # Arrivals at the exact end of the run are counted too.
    totals, _ = np.histogram(np.clip(times, 0.0, edges[-1]), bins=edges, weights=tokens)
    return Curve(edges[:-1], totals / np.diff(edges))


def decode_rate(records: Sequence[MeasuredRequest], *, streams: int) -> float | None:
    """Return output tokens/s while `streams` requests decoded and none was in prefill.

    Counts the arrivals after the beginning of each such interval, including those at its end, over
    the sum of the intervals. None if there is none: the requests are too short or their prefills
    leave no gap.
    """
    changes: list[tuple[float, int, int]] = []
    for record in records:
        sent_s, first_s, last_s = record.sent_s, record.first_token_s, record.last_token_s
        if sent_s is None or first_s is None or last_s is None:
            continue
        changes += [(sent_s, 1, 0), (first_s, -1, 1), (last_s, 0, -1)]
    stretches: list[tuple[float, float]] = []
    prefilling = decoding = 0
    begun_s: float | None = None
    for time_s, prefill, decode in sorted(changes):
        prefilling, decoding = prefilling + prefill, decoding + decode
        pure = prefilling == 0 and decoding == streams
        if pure and begun_s is None:
            begun_s = time_s
        elif not pure and begun_s is not None:
            stretches.append((begun_s, time_s))
            begun_s = None
    total_s = sum(end - begin for begin, end in stretches)
    if total_s <= 0:
        return None
    times, tokens = _arrivals(records)
    order = np.argsort(times, kind="stable")
    times, sums = times[order], np.append(0.0, np.cumsum(tokens[order]))
    ends = np.searchsorted(times, np.asarray(stretches), side="right")
    return float(np.sum(sums[ends[:, 1]] - sums[ends[:, 0]]) / total_s)


def _arrivals(records: Sequence[MeasuredRequest]) -> tuple[Floats, Floats]:
    """Return the time and the number of tokens of every arrival of every request."""
    times = [time for record in records for time in record.arrival_times_s]
    tokens = [count for record in records for count in record.arrival_tokens]
    return np.asarray(times, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
