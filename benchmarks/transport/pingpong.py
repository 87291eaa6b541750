"""Does the rally overlap as the paper's formula says, and does auto choose well?

One attention node and one expert node, each one thread on a separate core, spinning over shared
memory with an emulated link; real kernels on random weights. For a grid of T_c/T_f and m = 1..4,
with the rows of a micro-batch held constant: the measured step, the formula's T_total =
(T_a + T_e + 2 T_c) + T_f (m L - 1) with T_a and T_e measured at m = 1, and their ratio. Then with
the batch held constant: every m, and auto's final choice. Writes results/pingpong.json and .png,
and pingpong_rally.png, the Gantt chart. Run as `topspin bench pingpong`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from app.cli.trace.plot import draw_gantt, gantt_window
from app.cli.trace.report import lanes_of
from benchmarks import report
from benchmarks.experiment import Experiment, Result, TextTable, number, rounds_in_turn, table
from benchmarks.pingpong_nodes import MAX_M, WARM_UP_STEPS, Node, Shape
from server.scheduler.micro_batching.cost import CostFit, StepLoad, linked_cost_model
from server.scheduler.micro_batching.split import (
    NodeLoad,
    choose_num_micro_batches,
)
from topspin.errors import ConfigError
from topspin.messages import StepTimings
from topspin.pipeline import HopTimes, pipeline_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIOS = (0.0, 0.25, 0.5, 1.0)
TARGET_RATIO = 0.5


def rally_s(timings: StepTimings) -> float:
    """Return a step's time in all layers, without inputs and sampling."""
    return timings.attention_s + timings.wait_s


def measure_hops(node: Node, num_steps: int) -> HopTimes:
    """Return T_a, T_e and the link's T_c, at m = 1 on a link without added latency."""
    node.open(0.0)
    steps = node.measure(1, node.shape.rows, num_steps)
    node.close()
    num_layers = node.shape.num_layers
    links = [each.link_s for each in steps if each.link_s is not None]
    return HopTimes(
        t_a=statistics.median(each.attention_s for each in steps) / num_layers,
        t_e=statistics.median(each.expert_s for each in steps) / num_layers,
        t_c=statistics.median(links) if links else 0.0,
    )


def _times(
    node: Node, rows_of: Callable[[int], int], *, num_steps: int, rounds: int
) -> dict[int, list[float]]:
    """Return the seconds of steps by the number of micro-batches, which take turns."""

    def measure(m: int, turn: int) -> list[float]:
        return [rally_s(each) for each in node.measure(m, rows_of(m), num_steps)]

    numbers = {m: m for m in range(1, MAX_M + 1)}
    found = rounds_in_turn(numbers, measure, rounds=rounds, warm_ups=0)
    return {m: [each for turn in found for each in turn[m]] for m in numbers}


def constant_rows(
    node: Node, hops: HopTimes, ratio: float, *, num_steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure m = 1..4 with the rows of a micro-batch held constant; m take turns."""
    t_f = max(hops.t_a, hops.t_e)
    node.open(max(0.0, ratio * t_f - hops.t_c) * 1e6)
    found = _times(node, lambda m: m * node.shape.rows, num_steps=num_steps, rounds=rounds)
    node.close()
    t_c = max(hops.t_c, ratio * t_f)
    rows = []
    single_s = statistics.median(found[1])
    for m, times in found.items():
        measured_s = statistics.median(times)
        hop_count = m * node.shape.num_layers
        formula_s = hops.t_a + hops.t_e + 2 * t_c + t_f * (hop_count - 1)
        exact_s = pipeline_s(
            hops._replace(t_c=t_c),
            num_micro_batches=m,
            num_layers=node.shape.num_layers,
            shares_cores=False,
        )
        rows.append(
            {
                "tc_over_tf": ratio,
                "m": m,
                "measured_ms": round(measured_s * 1e3, 3),
                "formula_ms": round(formula_s * 1e3, 3),
                "pipeline_ms": round(exact_s * 1e3, 3),
                "of_formula": round(formula_s / measured_s, 3),
                "of_pipeline": round(exact_s / measured_s, 3),
                "throughput_over_m1": round(m * single_s / measured_s, 3),
            }
        )
    return rows


def constant_batch(
    node: Node, hops: HopTimes, ratio: float, *, num_steps: int, rounds: int
) -> dict[str, Any]:
    """Split one batch into 1..4, and let auto choose, fitting its model as it goes."""
    shape = node.shape
    latency_us = max(0.0, ratio * max(hops.t_a, hops.t_e) - hops.t_c) * 1e6
    node.open(latency_us)
    fit = CostFit(
        linked_cost_model(latency_us=latency_us, gbps=None, hidden_size=shape.hidden_size),
        shape.num_layers,
    )
    chosen: int | None = None
    switches = 0
    node.begin(shape.rows)
    for _ in range(max(40, num_steps)):
        cost = fit.of(0)
        slice_s = cost.slice_s(1, shape.context)
        load = NodeLoad(shape.rows, shape.rows, shape.rows * slice_s, slice_s)
        before, chosen = (
            chosen,
            choose_num_micro_batches(
                cost, [load], shares_cores=False, num_layers=shape.num_layers, current=chosen
            ),
        )
        switches += before is not None and before != chosen
        timings = node.step(chosen)
        pairs = float(shape.rows * (shape.context + 1))
        fit.add_attention(0, StepLoad(chosen, shape.rows, pairs), timings.attention_s)
        fit.add_expert(chosen, shape.rows, timings.expert_s)
        if timings.link_s is not None:
            fit.add_link(shape.rows / chosen, timings.link_s)
    assert chosen is not None
    found = _times(node, lambda m: shape.rows, num_steps=num_steps, rounds=rounds)
    node.close()
    medians = {m: statistics.median(times) for m, times in found.items()}
    best = min(medians, key=lambda m: medians[m])
    return {
        "tc_over_tf": ratio,
        "step_ms": {str(m): round(time_s * 1e3, 3) for m, time_s in medians.items()},
        "best_m": best,
        "auto_m": chosen,
        "auto_switches": switches,
        "auto_over_best": round(medians[chosen] / medians[best], 3),
    }


def trace_cost(node: Node, hops: HopTimes, *, num_steps: int, rounds: int, png: Path) -> float:
    """Return the ratio of a step's time with the recorder on to that with it off; draws the rally.

    m = 3 at T_c = 0.5 T_f; on and off take turns step by step.
    """
    node.open(max(0.0, TARGET_RATIO * max(hops.t_a, hops.t_e) - hops.t_c) * 1e6)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        node.begin(3 * node.shape.rows)
        for idx in range(WARM_UP_STEPS + 2 * num_steps):
            traced = idx % 2 == 1
            step_s = rally_s(node.step(3, traced=traced))
            if idx >= WARM_UP_STEPS:
                times[traced].append(step_s)
    lanes = lanes_of(node.close())
    start_ns, end_ns = gantt_window(lanes, num_layers=5)
    title = f"The rally: m = 3, T_c = {TARGET_RATIO:g} T_f, five layers of a step (measured)"
    with contextlib.suppress(ConfigError):  # no matplotlib: no picture
        draw_gantt(lanes, png, title=title, start_ns=start_ns, end_ns=end_ns)
    return statistics.median(times[True]) / statistics.median(times[False])


def layout(result: Result) -> Iterator[TextTable | str]:
    """Yield the overlap against the formula, and the choice of `auto`."""
    hops = result["hops_ms"]
    yield (
        f"T_a {number(hops['t_a'])} ms, T_e {number(hops['t_e'])} ms, rows of a micro-batch "
        f"held at {result['shape']['rows']}:"
    )
    columns = {
        "T_c / T_f": "{tc_over_tf:g}",
        "m": "{m}",
        "step ms": "{measured_ms}",
        "formula ms": "{pipeline_ms}",
        "reached": "{of_pipeline:.0%}",
        "throughput": "{throughput_over_m1:.2f}x",
    }
    yield table(columns, result["constant_rows"])
    yield "The batch held constant, step ms for each m, and what `auto` settles on:"
    columns = {
        "T_c / T_f": "{tc_over_tf:g}",
        **{f"m = {m}": f"{{step_ms[{m}]}}" for m in result["constant_batch"][0]["step_ms"]},
        "best m": "{best_m}",
        "auto's m": "{auto_m}",
        "auto / best": "{auto_over_best:.2f}x",
    }
    # str.format takes a key of digits for a number.
    yield table(
        columns,
        (
            {**row, "step_ms": {int(m): each for m, each in row["step_ms"].items()}}
            for row in result["constant_batch"]
        ),
    )


def draw(result: Result, figure: Figure) -> None:
    """Draw measured steps against the formula's."""
    rows = result["constant_rows"]
    ratios = sorted({row["tc_over_tf"] for row in rows})
    figure.set_size_inches(11, 3)
    axes = figure.subplots(1, len(ratios), sharey=True)
    for axis, ratio in zip(axes, ratios, strict=True):
        own = [row for row in rows if row["tc_over_tf"] == ratio]
        ms = [row["m"] for row in own]
        axis.bar(ms, [row["measured_ms"] / row["m"] for row in own], color="#0072B2")
        axis.plot(ms, [row["formula_ms"] / row["m"] for row in own], "o--", color="#E69F00")
        axis.set_title(f"T_c = {ratio:g} T_f")
        axis.set_xlabel("micro-batches")
    axes[0].set_ylabel("ms per micro-batch and step")
    figure.legend(["formula", "measured"], loc="upper right", fontsize=8)


EXPERIMENT = Experiment("pingpong", __doc__, layout, draw)


def run(shape: Shape, *, num_steps: int, rounds: int, png: Path) -> dict[str, Any]:
    """Measure everything; this process is the attention node."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: each role has one of its own")
    os.sched_setaffinity(0, {cores[0]})
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    batches: list[dict[str, Any]] = []
    with torch.inference_mode():
        node = Node(shape, expert_core=cores[-1])
        hops = measure_hops(node, 2 * num_steps)
        for ratio in RATIOS:
            rows += constant_rows(node, hops, ratio, num_steps=num_steps, rounds=rounds)
            batches.append(constant_batch(node, hops, ratio, num_steps=num_steps, rounds=rounds))
        cost = trace_cost(node, hops, num_steps=2 * num_steps, rounds=rounds, png=png)
        hops_after = measure_hops(node, 2 * num_steps)
    os.sched_setaffinity(0, set(cores))
    return {
        "shape": shape._asdict(),
        **{
            key: {name: round(value * 1e3, 4) for name, value in each._asdict().items()}
            for key, each in (("hops_ms", hops), ("hops_after_ms", hops_after))
        },
        "trace_on_over_off": round(cost, 4),
        "constant_rows": rows,
        "constant_batch": batches,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid, print a table, write JSON and pictures."""
    parser = EXPERIMENT.parser(rounds=3)
    parser.add_argument("--steps", type=int, default=10, help="steps per turn (%(default)s)")
    parser.add_argument("--rows", type=int, default=Shape().rows, help="rows of a micro-batch")
    parser.add_argument("--layers", type=int, default=Shape().num_layers, help="MoE layers")
    args = parser.parse_args(argv)
    shape = Shape()._replace(rows=args.rows, num_layers=args.layers)
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere) if args.no_write else args.result_dir or report.RESULTS
        png = folder / f"{args.name}_rally.png"
        result = run(shape, num_steps=args.steps, rounds=args.rounds, png=png)
    return EXPERIMENT.finish(args, result)


if __name__ == "__main__":
    raise SystemExit(main())
