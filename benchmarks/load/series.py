"""The course of a run over time: bars of requests, throughput, concurrency, decode windows.

Pure functions from records to numbers, for pictures and comparisons. Times are seconds from
the run's start. Knows no picture and no percentile (benchmarks.load.metrics has those).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.load.contracts import RequestRecord, Run

Floats = npt.NDArray[np.float64]


class Bar(NamedTuple):
    """One request in the timeline: until sent it queued in the client, then prefill, decode.

    The phases that a failed request did not reach end at its end.
    """

    start_s: float
    sent_s: float
    first_token_s: float
    end_s: float
    ok: bool


class Curve(NamedTuple):
    """A step curve: from times_s[i] on the value is values[i], until the next time."""

    times_s: Floats
    values: Floats


def bars(run: Run) -> list[Bar]:
    """Return a bar for each started request, in the order of the intended times."""
    found = []
    for record in sorted(run.records, key=lambda record: (record.intended_s, record.index)):
        end_s = run.duration_s if record.end_s is None else record.end_s
        sent_s = end_s if record.sent_s is None else record.sent_s
        first_s = end_s if record.first_token_s is None else record.first_token_s
        found.append(Bar(record.intended_s, sent_s, first_s, end_s, record.ok))
    return found


def cdf(values: Iterable[float]) -> Curve:
    """Return the empirical distribution: sorted values as `times_s`, shares up to 1."""
    ordered = np.sort(np.asarray(list(values), dtype=np.float64))
    return Curve(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)))


def concurrency(records: Sequence[RequestRecord]) -> Curve:
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


def averages(curve: Curve, width_s: float, duration_s: float) -> Curve:
    """Return the mean over time of a step curve in bins of `width_s`, up to `duration_s`."""
    edges = _edges(duration_s, width_s)
    times = np.append(curve.times_s, max(duration_s, float(curve.times_s[-1])))
    areas = np.append(0.0, np.cumsum(curve.values * np.diff(times)))
    return Curve(edges[:-1], np.diff(np.interp(edges, times, areas)) / np.diff(edges))


def bin_width_s(duration_s: float, *, bins: int = 60) -> float:
    """Return a round width (1, 2 or 5 times a power of ten) giving at most `bins` bins."""
    least = max(duration_s, 1e-3) / bins
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= least * 0.999))


def throughput(run: Run, width_s: float) -> Curve:
    """Return output tokens per second in bins of `width_s` from the start.

    A partial last bin is divided by its actual length.
    """
    edges = _edges(run.duration_s, width_s)
    times, tokens = _arrivals(run.records)
    # Arrivals at the exact end of the run are counted too.
    totals, _ = np.histogram(np.clip(times, 0.0, edges[-1]), bins=edges, weights=tokens)
    return Curve(edges[:-1], totals / np.diff(edges))


def _edges(duration_s: float, width_s: float) -> Floats:
    """Return the bounds of bins of `width_s`; the last one ends with the run."""
    duration_s = max(duration_s, 1e-9)
    count = max(1, int(np.ceil(duration_s / width_s - 1e-9)))
    return np.append(np.arange(count) * width_s, duration_s)


def decode_rate(records: Sequence[RequestRecord], *, streams: int) -> float | None:
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


def _arrivals(records: Sequence[RequestRecord]) -> tuple[Floats, Floats]:
    """Return the time and the number of tokens of every arrival of every request."""
    times = [time for record in records for time in record.arrival_times_s]
    tokens = [count for record in records for count in record.arrival_tokens]
    return np.asarray(times, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
