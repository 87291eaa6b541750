"""Several servers on the same prompts: medians, ratios with their spread, equal answers.

Owns the arithmetic; sends nothing. Called by benchmarks.load.compare with each round's figures.

The byte floor is the time in which the memory gives the weights that a step of one request
needs: with more requests, a step reads more experts, and how many depends on the routing.

Ratios are taken pair by pair: a target's figure in a round over the first target's figure in
the same round, measured minutes and not hours apart, so that a machine's slowdown affects
both. Their spread is the least and the greatest round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.experiment import spread
from benchmarks.load.contracts import LoadRun
from benchmarks.load.figures.metrics import measure_run
from benchmarks.load.figures.series import decode_rate


@dataclass(frozen=True)
class RoundFigures:
    """One target in one round at one concurrency; None where it could not be measured.

    Rates in tokens/s: `prefill` counts prompt tokens of requests for one output token,
    `decode` output tokens while all streams decoded and none was in prefill (series.decode_rate).
    """

    output_throughput: float | None = None
    median_ttft_ms: float | None = None
    median_tpot_ms: float | None = None
    prefill_throughput: float | None = None
    decode_throughput: float | None = None


# The name of each figure, with its unit, in the order of display.
NAMES = {
    "output_throughput": "output throughput (tokens/s)",
    "decode_throughput": "decode rate (tokens/s)",
    "prefill_throughput": "prefill rate (prompt tokens/s)",
    "median_ttft_ms": "median TTFT (ms)",
    "median_tpot_ms": "median TPOT (ms)",
}


def byte_floor(weight_bytes: int, read_bytes_per_s: float) -> dict[str, float]:
    """Return the least time of a step of one request: the bytes it reads over the bandwidth."""
    return {
        "weight_bytes": weight_bytes,
        "read_bytes_per_s": read_bytes_per_s,
        "ms_per_token": 1000 * weight_bytes / read_bytes_per_s,
    }


def figures_of(run: LoadRun, *, prefill: LoadRun, streams: int) -> RoundFigures:
    """Return a round's figures from the main run and the prefill run."""
    figures = measure_run(run)
    if not figures["completed"]:
        return RoundFigures()
    return RoundFigures(
        output_throughput=figures["output_throughput"],
        median_ttft_ms=figures["median_ttft_ms"],
        median_tpot_ms=figures["median_tpot_ms"] or None,
        prefill_throughput=prefill_throughput(prefill),
        decode_throughput=decode_rate(run.records, streams=streams),
    )


def prefill_throughput(run: LoadRun) -> float | None:
    """Return prompt tokens/s from the first request sent to the last token, or None."""
    done = [
        (record.sent_s, record.last_token_s, record.prompt_tokens)
        for record in run.records
        if record.ok
    ]
    sent = [sent_s for sent_s, _, _ in done if sent_s is not None]
    last = [last_s for _, last_s, _ in done if last_s is not None]
    tokens = [count for _, _, count in done if count is not None]
    if not sent or not last or len(tokens) < len(done) or max(last) <= min(sent):
        return None
    return sum(tokens) / (max(last) - min(sent))


def summarise(rounds: Sequence[Mapping[str, RoundFigures]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return target -> figure -> its spread and, beside the first target's, the ratios' spread.

    `rounds` holds each round's figures by target, the first target first. A figure that no round
    has is left out, and so is a ratio if no round has both of its figures.
    """
    first = next(iter(rounds[0]))
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for target in rounds[0]:
        table[target] = {}
        for name in NAMES:
            pairs = [(getattr(r[target], name), getattr(r[first], name)) for r in rounds]
            values = [value for value, _ in pairs if value is not None]
            if not values:
                continue
            row: dict[str, Any] = spread(values)._asdict()
            ratios = [value / base for value, base in pairs if value is not None and base]
            if target != first and ratios:
                row["ratio"] = spread(ratios)._asdict()
            table[target][name] = row
    return table


class AnswerAgreement(NamedTuple):
    """The agreement of two targets' greedy answers to the same prompts.

    `identical` is the share of equal answers; the common prefixes are means over all prompts,
    in characters and, with a tokenizer, in tokens of the answers' texts.
    """

    num_prompts: int
    identical: float
    common_prefix_characters: float
    common_prefix_tokens: float | None
    first_difference: str | None


def agreement(
    answers: Sequence[str], others: Sequence[str], encode: Callable[[str], list[int]] | None
) -> AnswerAgreement:
    """Compare `others` with `answers`, prompt by prompt; `encode` turns text into token ids."""
    pairs = list(zip(answers, others, strict=True))
    different = next(((a, b) for a, b in pairs if a != b), None)
    return AnswerAgreement(
        num_prompts=len(pairs),
        identical=sum(a == b for a, b in pairs) / len(pairs),
        common_prefix_characters=statistics.mean(common_prefix(a, b) for a, b in pairs),
        common_prefix_tokens=None
        if encode is None
        else statistics.mean(common_prefix(encode(a), encode(b)) for a, b in pairs),
        first_difference=None if different is None else _where(*different),
    )


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of equal leading items."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((idx for idx, (x, y) in pairs if x != y), min(len(a), len(b)))


def _where(a: str, b: str) -> str:
    start = common_prefix(a, b)
    begin = max(0, start - 20)
    return f"{a[begin : start + 20]!r} against {b[begin : start + 20]!r}"
