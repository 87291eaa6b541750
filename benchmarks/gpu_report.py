"""What the figures of `make gpu` amount to: verdicts, a short table, the README's table.

Owns the comparisons: kernels with their goals, decoding with its gates and goals, Topspin
with the best of the peer's variants at the same batch. Pure: reads figures, knows no device.
Called by benchmarks.gpu and benchmarks.table_layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from topspin.errors import ConfigError

Figure = Mapping[str, Any]

GOAL_OVER_PEER: Final = 3.0


@dataclass(frozen=True)
class Verdict:
    """A figure beside what was asked of it."""

    what: str
    reached: float
    unit: str
    """"share" (of the roofline or floor), "us" (less is better), or "x" (times the peer)."""
    gate: float | None
    goal: float | None

    def meets(self, bound: float | None) -> bool:
        """Say whether a bound is kept; one that there is not always is."""
        if bound is None:
            return True
        return self.reached <= bound if self.unit == "us" else self.reached >= bound

    @property
    def word(self) -> str:
        """Say it in a word."""
        if not self.meets(self.gate):
            return "below the gate"
        return "reached" if self.meets(self.goal) else "short of the goal"


def judge(figures: Sequence[Figure]) -> list[Verdict]:
    """Give a verdict for every figure of which something was asked."""
    return [*_kernels(figures), *_decode(figures), *_peer(figures)]


def _kernels(figures: Sequence[Figure]) -> Iterable[Verdict]:
    for row in figures:
        if row["of"] != "kernel":
            continue
        what = f"{row['op']}: {row['shape']}"
        if row["goal"] is not None:
            yield Verdict(what, row["fraction"], "share", None, row["goal"])
        if row["goal_beyond_us"] is not None:
            yield Verdict(what, row["beyond_us"], "us", None, row["goal_beyond_us"])


def best(figures: Sequence[Figure], of: str, engine: str) -> dict[int, Figure]:
    """Give the fastest variant's figure by batch (decode) or by tokens (prefill)."""
    key = "batch" if of == "decode" else "tokens"
    found: dict[int, Figure] = {}
    for row in figures:
        if row["of"] == of and row["engine"] == engine:
            other = found.get(row[key])
            if other is None or row["tokens_per_s"] > other["tokens_per_s"]:
                found[row[key]] = row
    return found


def _decode(figures: Sequence[Figure]) -> Iterable[Verdict]:
    for batch, row in sorted(best(figures, "decode", "topspin").items()):
        if row["gate"] is not None:
            what = f"decode, batch {batch}, context {row['context']} ({row['variant']})"
            yield Verdict(what, row["fraction"], "share", row["gate"], row["goal"])


def _peer(figures: Sequence[Figure]) -> Iterable[Verdict]:
    ours, theirs = (best(figures, "decode", name) for name in ("topspin", "transformers"))
    for batch in sorted(ours.keys() & theirs.keys()):
        if ours[batch]["gate"] is None:
            continue
        ratio = ours[batch]["tokens_per_s"] / theirs[batch]["tokens_per_s"]
        what = f"decode, batch {batch}, against transformers ({theirs[batch]['variant']})"
        yield Verdict(what, ratio, "x", None, GOAL_OVER_PEER)


def written(value: float | None, unit: str) -> str:
    """Write a figure of a verdict."""
    if value is None:
        return "-"
    return {"share": f"{value:.0%}", "us": f"{value:.1f} us", "x": f"{value:.2f}x"}[unit]


Row = list[str]


def verdict_rows(verdicts: Iterable[Verdict]) -> list[Row]:
    """Give the rows: what, reached, gate, goal, verdict."""
    return [
        [
            *(v.what, written(v.reached, v.unit), written(v.gate, v.unit)),
            *(written(v.goal, v.unit), v.word),
        ]
        for v in verdicts
    ]


def kernel_rows(figures: Sequence[Figure]) -> list[Row]:
    """Give the rows: op, shape, us, GB/s, TFLOP/s, bound, share of the roofline, goal."""
    return [
        [
            *(row["op"], row["shape"], f"{row['us']:.1f}", f"{row['bytes_per_s'] / 1e9:.0f}"),
            *(f"{row['flops_per_s'] / 1e12:.1f}", row["bound"], f"{row['fraction']:.0%}"),
            written(row["goal"], "share"),
        ]
        for row in figures
        if row["of"] == "kernel"
    ]


def decode_rows(figures: Sequence[Figure]) -> list[Row]:
    """Give the rows: engine, variant, batch, ms a step, tokens/s, share of the floor."""
    return [
        [
            *(row["engine"], row["variant"], str(row["batch"]), f"{row['step_ms']:.2f}"),
            *(f"{row['tokens_per_s']:.0f}", written(row.get("fraction"), "share")),
        ]
        for row in figures
        if row["of"] == "decode"
    ]


def prefill_rows(figures: Sequence[Figure]) -> list[Row]:
    """Give the rows: engine, variant, tokens, ms, tokens/s."""
    return [
        [
            *(row["engine"], row["variant"], str(row["tokens"])),
            *(f"{row['ms']:.1f}", f"{row['tokens_per_s']:.0f}"),
        ]
        for row in figures
        if row["of"] == "prefill"
    ]


KERNEL_HEADINGS: Final = ("op", "shape", "us", "GB/s", "TFLOP/s", "bound", "roofline", "goal")
DECODE_HEADINGS: Final = ("engine", "variant", "batch", "ms/step", "tokens/s", "byte floor")
PREFILL_HEADINGS: Final = ("engine", "variant", "tokens", "ms", "tokens/s")
VERDICT_HEADINGS: Final = ("what", "reached", "gate", "goal", "verdict")


def ceilings(figures: Sequence[Figure]) -> str:
    """Say what the device did at best."""
    found = {row["name"]: row["per_s"] for row in figures if row["of"] == "ceiling"}
    parts = []
    if "copy" in found:
        parts.append(f"copy {found.pop('copy') / 1e12:.2f} TB/s (read and written)")
    parts += [f"{name} product {rate / 1e12:.0f} TFLOP/s" for name, rate in found.items()]
    return ", ".join(parts)


def test_counts(figures: Sequence[Figure]) -> str:
    """Say how the tests ended; "" without any."""
    return "; ".join(
        f"tests: {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
        for row in figures
        if row["of"] == "tests"
    )


def tables(result: Mapping[str, Any]) -> list[tuple[str, Sequence[str], list[Row]]]:
    """Give every table of a result: its title, headings and rows; none that is empty."""
    figures = result["figures"]
    found = [
        ("Against what was asked", VERDICT_HEADINGS, verdict_rows(judge(figures))),
        ("Kernels", KERNEL_HEADINGS, kernel_rows(figures)),
        ("Decode", DECODE_HEADINGS, decode_rows(figures)),
        ("Prefill", PREFILL_HEADINGS, prefill_rows(figures)),
    ]
    return [(title, headings, rows) for title, headings, rows in found if rows]


def check_measured(result: Mapping[str, Any]) -> None:
    """Raise ConfigError for a result that holds no speeds of a device."""
    if result["interpreted"] or result["quick"]:
        raise ConfigError(
            "a result of make gpu that was interpreted or made with --quick holds no speeds: "
            "it has no place among the results"
        )
