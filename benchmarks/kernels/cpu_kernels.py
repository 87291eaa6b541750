"""The CPU kernels against this machine's limits.

Measures the machine in the same run (read bandwidth of an array larger than the cache; rates of
torch's large matmuls, in bf16 and, the limit of quantised weights, in int8) and every op of
a step at the shapes of two models and several numbers of rows, and divides the least time that
an op's bytes and operations take (roofline.py) by its median time. Cases take turns;
before every turn the bandwidth is measured again, which also empties the cache, and before
every round the matmuls; their 99th percentiles are the limits. Where torch multiplies neither bf16
nor int8 fast (AVX2 only) the rate of fp32 stands for both. Writes results/cpu_kernels.json and
.png. Run as `topspin bench cpu-kernels`.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.experiment import COLOURS, Experiment, Result, TextTable, number, say
from benchmarks.kernels.cpu_kernel_cases import (
    BUILDERS,
    MAX_COPIES,
    SHAPES,
    KernelCase,
    cache_bytes,
)
from benchmarks.kernels.roofline import OpWork, Roofline, ceiling
from kernels.cpu.matmul import can_prepack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = (1, 4, 16, 128)
# The array read for the bandwidth is so many times the size of the cache.
PROBE_FILLS = 4
# Large enough for the full rate, and short enough to run undisturbed on a busy machine.
MATMUL_SIZE = 1536
# A case's turn ends after this time, or when it has used every copy of its weights once.
TURN_S = 0.003
SINGLE_CORE_PROBES = 5
# Sampling depends only on the vocabulary, and both models' are equal; attention to long contexts
# hardly on the number of key/value heads; latents are of another model.
SAME_FOR_ALL = ("long_attention", "latent_attention", "sampling")


@dataclass
class Ceilings:
    """The machine's measured rates: many samples of each, in bytes or operations/s."""

    bytes_per_s: list[float] = field(default_factory=list)
    bf16_per_s: list[float] = field(default_factory=list)
    int8_per_s: list[float] = field(default_factory=list)

    def roofline(self, precision: str) -> Roofline:
        """Return the roofline of products with weights in `precision`."""
        operations = self.int8_per_s if precision != "bf16" else self.bf16_per_s
        return Roofline(ceiling(self.bytes_per_s), ceiling(operations))

    def as_json(self) -> dict[str, float]:
        """Return the ceilings as written to the result."""
        return {
            "read_gb_per_s": round(ceiling(self.bytes_per_s) / 1e9, 1),
            "bf16_gflop_per_s": round(ceiling(self.bf16_per_s) / 1e9, 1),
            "int8_gop_per_s": round(ceiling(self.int8_per_s) / 1e9, 1),
        }


class Probe:
    """Measures the machine, on torch's threads; results are appended to a Ceilings."""

    def __init__(self, size_bytes: int, matmul_size: int) -> None:
        """Read `size_bytes` and multiply square matrices of `matmul_size`."""
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # On huge pages, as some weights are; a Linux kernel without them refuses the advice.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._array = torch.frombuffer(pages, dtype=torch.float32).fill_(1)
        shape = (matmul_size, matmul_size)
        self._numbers = torch.randn(shape)
        self._codes: Tensor | None = None
        if can_prepack(torch.bfloat16):
            self._numbers = self._numbers.bfloat16()
            self._codes = torch.randint(-128, 128, shape, dtype=torch.int8)
        self._num_operations = 2 * matmul_size**3

    def read(self, found: Ceilings) -> None:
        """Read the array once, which also evicts all other data from the cache."""
        started = time.perf_counter()
        self._array.sum()
        found.bytes_per_s.append(self._array.nbytes / (time.perf_counter() - started))

    def multiply(self, found: Ceilings) -> None:
        """Multiply once in bf16, and once 8-bit integers to 32-bit sums, or once in fp32."""
        started = time.perf_counter()
        F.linear(self._numbers, self._numbers)
        between = time.perf_counter()
        found.bf16_per_s.append(self._num_operations / (between - started))
        if self._codes is None:
            found.int8_per_s.append(found.bf16_per_s[-1])
            return
        torch._int_mm(self._codes, self._codes)
        ended = time.perf_counter()
        found.int8_per_s.append(self._num_operations / (ended - between))


def take_turns(
    cases: Sequence[KernelCase], probe: Probe, found: Ceilings, num_rounds: int
) -> list[list[float]]:
    """Time all cases in turn, `num_rounds` times, after a call of each, which may compile.

    Returns the seconds of each case's calls; the machine's rates meanwhile are added to `found`.
    """
    seconds: list[list[float]] = [[] for _ in cases]
    next_copy = [0] * len(cases)
    for case in cases:
        case.call(0)
    for _ in range(num_rounds):
        probe.multiply(found)
        for idx, case in enumerate(cases):
            probe.read(found)
            if not case.cold:
                case.call(next_copy[idx])
            next_copy[idx] += _turn(case, next_copy[idx], seconds[idx])
    return seconds


def _turn(case: KernelCase, first: int, seconds: list[float]) -> int:
    """Append the times of a turn's calls; returns how many there were."""
    started = time.perf_counter()
    for count in range(MAX_COPIES):
        before = time.perf_counter()
        case.call(first + count)
        after = time.perf_counter()
        seconds.append(after - before)
        if after - started > TURN_S:
            return count + 1
    return MAX_COPIES


def figures(case: KernelCase, seconds: Sequence[float]) -> dict[str, Any]:
    """Return a case's measurements as JSON: the median time and its rates."""
    median_s, work = statistics.median(seconds), case.work
    return {
        "model": case.model,
        "op": case.op,
        "precision": case.precision,
        "rows": case.num_rows,
        "context": case.context,
        "cold": case.cold,
        "calls": len(seconds),
        "us_p50": round(median_s * 1e6, 2),
        "bytes": round(work.num_bytes),
        "flops": round(work.flops),
        "gb_per_s": round(work.num_bytes / median_s / 1e9, 2),
        "gflop_per_s": round(work.flops / median_s / 1e9, 2),
    }


def against(roofline: Roofline, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a case with its limit and the share of the limit that it reaches."""
    work = OpWork(row["bytes"], row["flops"])
    return {
        **row,
        "bound": roofline.bound(work),
        "roofline_us": round(roofline.least_s(work) * 1e6, 2),
        "fraction": round(roofline.fraction(work, row["us_p50"] / 1e6), 3),
    }


def single_core(probe: Probe) -> Ceilings:
    """Measure the ceilings of one core."""
    threads, found = torch.get_num_threads(), Ceilings()
    torch.set_num_threads(1)
    try:
        for _ in range(SINGLE_CORE_PROBES):
            probe.read(found)
            probe.multiply(found)
    finally:
        torch.set_num_threads(threads)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the measurements of the flags; returns the result's JSON."""
    torch.manual_seed(0)
    probe, found = Probe(PROBE_FILLS * cache_bytes(), MATMUL_SIZE), Ceilings()
    rows: list[dict[str, Any]] = []
    one = single_core(probe)
    for shape in SHAPES:
        if shape.model not in args.models:
            continue
        for name in args.ops:
            if name in SAME_FOR_ALL and shape is not SHAPES[0] and len(args.models) > 1:
                continue
            say(f"{shape.model}: {name}")
            cases = list(BUILDERS[name](shape, args.rows))
            seconds = take_turns(cases, probe, found, args.rounds)
            rows += [figures(*pair) for pair in zip(cases, seconds, strict=True)]
    return {
        "settings": {
            "threads": torch.get_num_threads(),
            "rounds": args.rounds,
            "environment": {k: value for k, value in os.environ.items() if "OMP_" in k},
        },
        "ceilings": {"one_core": one.as_json(), "all_cores": found.as_json()},
        "rows": [against(found.roofline(row["precision"]), row) for row in rows],
    }


def _label(row: Mapping[str, Any]) -> str:
    """Name a row without its model and its number of rows."""
    return f"{row['op']}, {row['context'] or row['precision']}"


def layout(result: Result) -> Iterator[TextTable | str]:
    """Yield shares of the roofline, a table per model with a column per number of rows."""
    for cores, row in result["ceilings"].items():
        yield (
            f"{cores.replace('_', ' ').capitalize()}: {number(row['read_gb_per_s'])} GB/s read, "
            f"{number(row['bf16_gflop_per_s'])} GFLOP/s in bf16."
        )
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        found: dict[tuple[str, str], dict[int, str]] = {}
        for row in result["rows"]:
            if row["model"] == model:
                key = (row["op"], str(row["context"] or row["precision"]))
                share = f"{row['fraction']:.0%}"
                cell = share if row["cold"] else f"({share})"
                found.setdefault(key, {})[row["rows"]] = f"{cell} {number(row['us_p50'])} us"
        counts = sorted({rows for cells in found.values() for rows in cells})
        yield TextTable(
            [model, "weights or context", *(f"{rows} rows" for rows in counts)],
            [[*key, *(cells.get(n, "") for n in counts)] for key, cells in found.items()],
        )
    yield from _beside_the_product(result["rows"])


def _beside_the_product(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the rates of attention to latents, which is bound by arithmetic as a product is."""
    rate = next((row["gflop_per_s"] for row in rows if row["op"] == "product"), None)
    for row in rows:
        if rate is not None and row["op"].endswith("a latent"):
            yield (
                f"{row['op']}, {row['rows']} rows: {number(row['gflop_per_s'])} GFLOP/s, "
                f"{number(row['gb_per_s'])} GB/s, {row['gflop_per_s'] / rate:.0%} of the product's "
                f"{number(rate)} GFLOP/s."
            )


def draw(result: Result, figure: Figure) -> None:
    """Draw the fractions of the ops that read weights or keys, a panel per model."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in result["rows"]:
        if row["cold"]:
            panels[row["model"]][_label(row)].append((row["rows"], row["fraction"]))
    num_labels = max((len(panel) for panel in panels.values()), default=0)
    figure.set_size_inches(7 * max(len(panels), 1), 1.5 + 0.55 * num_labels)
    colours: dict[int, str] = {}
    for column, (model, panel) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), column + 1)
        for place, bars in enumerate(panel.values()):
            for idx, (num_rows, fraction) in enumerate(bars):
                known = num_rows in colours
                colour = colours.setdefault(num_rows, COLOURS[len(colours) % len(COLOURS)])
                height = place + 0.8 * ((idx + 0.5) / len(bars) - 0.5)
                label = None if known else f"rows: {num_rows}"
                axes.barh(height, fraction, height=0.8 / len(bars), color=colour, label=label)
        axes.set_yticks(range(len(panel)), list(panel))
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlabel("share of the roofline")
        axes.set_title(model)
    figure.legend(loc="outside lower center", ncols=max(len(colours), 1), frameon=False)


EXPERIMENT = Experiment("cpu_kernels", __doc__, layout, draw)


def _row_counts(text: str) -> tuple[int, ...]:
    rows = tuple(int(word) for word in text.split(","))
    if min(rows) < 1:
        raise argparse.ArgumentTypeError(f"{text}: every number of rows must be 1 or more")
    return rows


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the result."""
    models = [shape.model for shape in SHAPES]
    parser = EXPERIMENT.parser(rounds=11)
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--ops", nargs="+", choices=list(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--rows", type=_row_counts, default=ROWS, metavar="R,R,...")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; it must be 1 or more")
    return EXPERIMENT.finish(args, measure(args))


if __name__ == "__main__":
    raise SystemExit(main())
