"""Predicted against measured throughput and time per token of engines on this machine.

Starts one engine after the other on the same cores: one or two nodes of each role, over shared
memory, tcp and an emulated link; each answers 1, 4 and 16 requests at once. The planner's cost
model predicts each step from this machine's profile (`topspin profile`, with each model's tables),
to which only an emulated link's latency is added, and what is no part of an engine: the processor's
time of gateway, scheduler and client on the same cores, as the run measured it. Run as
`topspin bench served --device DEVICE.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from app.cli.serve import plan_of
from benchmarks.engine.local_layers import PROMPT_LEN, predicted_s
from benchmarks.experiment import (
    Experiment,
    Result,
    TextTable,
    ended_by_signals,
    say,
    settings_of,
    table,
)
from benchmarks.load.figures.metrics import tpot_s
from benchmarks.load.figures.series import decode_rate
from benchmarks.servers.topspin import Streams, TopspinServer
from deploy.placement.devices import DeviceProfile, load_profile
from models.description.config import load_model_config
from models.sources.hub import DEFAULT_MODEL, resolve_model
from topspin.plan.spec import EnginePlan
from topspin.plan.speculation import OFF

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REQUESTS: Final = (1, 4, 16)
MOST_OUTPUT: Final = 512
BOUNDS: Final = {"throughput": 8.0, "tpot": 15.0}
"""Per cent that the planner is to be within."""


class Engine(NamedTuple):
    """Attention and expert nodes, and the link between them."""

    num_attention: int
    num_experts: int
    transport: Literal["shm", "tcp"]
    latency_us: float = 0.0

    def __str__(self) -> str:
        link = f"{self.latency_us:g} us" if self.latency_us else self.transport
        return f"{self.num_attention} x {self.num_experts}, {link}"

    def plan(self, path: Path) -> EnginePlan:
        """Return the plan of an engine all of whose nodes use all cores, in turns."""
        return plan_of(
            path,
            max_model_len=min(1024, load_model_config(path).context_length),
            transport=self.transport,
            latency_us=self.latency_us,
            attention_nodes=self.num_attention,
            expert_nodes=self.num_experts,
            max_num_seqs=max(REQUESTS),
            micro_batches=1,
            kv_cache_bytes=256 * 2**20,
            layout="shared",
            speculation=OFF,
        )


LINKS: Final[tuple[tuple[Literal["shm", "tcp"], float], ...]] = (
    ("shm", 0.0),
    ("tcp", 0.0),
    ("shm", 500.0),
)
ENGINES: Final = tuple(
    Engine(*nodes, transport, latency_us)
    for nodes in ((1, 1), (1, 2), (2, 2))
    for transport, latency_us in LINKS
)


class Served(NamedTuple):
    """Tokens per second while all decode, and the seconds between a request's tokens.

    `serving_s`: the processor's seconds of gateway, scheduler and client for each step.
    """

    tokens_per_s: float
    between_s: float
    serving_s: float


def measured(server: TopspinServer, streams: Streams, rounds: int) -> Served:
    """Return the medians of all rounds.

    Outputs are made longer if the last request begins only when the first has ended.
    """
    found = list[Served]()
    for turn in range(-1, rounds):
        before_s = server.serving_cpu_s()
        records = server.generate(streams, turn).records
        serving_s = server.serving_cpu_s() - before_s
        rate = decode_rate(records, streams=streams.requests)
        if rate is None:
            if streams.output_len >= MOST_OUTPUT:
                raise SystemExit(f"{streams.requests} requests never decoded all at once")
            longer = streams._replace(output_len=2 * streams.output_len)
            return measured(server, longer, rounds)
        between_s = median(each for each in map(tpot_s, records) if each is not None)
        found.append(Served(rate, between_s, serving_s / streams.output_len))
    # The first round warms up.
    return Served(*map(median, zip(*found[1:], strict=True)))


def predicted(
    engine: Engine, profile: DeviceProfile, path: Path, streams: Streams, serving_s: float
) -> float:
    """Return the seconds of a decode step, see predicted_s()."""
    return predicted_s(
        profile,
        path,
        latency_us=engine.latency_us,
        num_local=0,
        load=streams,
        transport=engine.transport,
        # A node without a request leaves the cores to the others.
        num_nodes=(min(engine.num_attention, streams.requests), engine.num_experts),
        serving_s=serving_s,
    )


def compare(
    name: str, engine: Engine, profile: DeviceProfile, *, rounds: int, output_len: int
) -> Iterator[dict[str, Any]]:
    """Yield an engine's figures at each number of requests."""
    path = resolve_model(name)
    vocab_size = load_model_config(path).vocab_size
    with TopspinServer(engine.plan(path)) as server:
        for requests in REQUESTS:
            streams = Streams(requests, PROMPT_LEN, output_len, vocab_size)
            rate, between_s, serving_s = measured(server, streams, rounds)
            step_s = predicted(engine, profile, path, streams, serving_s)
            yield {
                "model": path.name,
                "engine": str(engine),
                "requests": requests,
                "serving_ms": serving_s * 1e3,
                "tokens_per_s": rate,
                "predicted_tokens_per_s": requests / step_s,
                "throughput_error": requests / step_s / rate - 1,
                "tpot_ms": between_s * 1e3,
                "predicted_tpot_ms": step_s * 1e3,
                "tpot_error": step_s / between_s - 1,
            }


def errors(rows: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """Yield median, p90 and worst error of each model, in per cent, and the bound it is held to."""
    for model in dict.fromkeys(row["model"] for row in rows):
        for name, bound in BOUNDS.items():
            own = [100 * abs(row[f"{name}_error"]) for row in rows if row["model"] == model]
            yield {
                "what": f"{model}: {name}",
                "points": len(own),
                "within": sum(each <= bound for each in own),
                "bound": bound,
                "median": median(own),
                "p90": float(np.quantile(own, 0.9)),
                "worst": max(own),
            }


ROWS: Final = {
    "model": "{model}",
    "engine": "{engine}",
    "requests": "{requests}",
    "serving, ms": "{serving_ms:.1f}",
    "tokens/s": "{tokens_per_s}",
    "predicted": "{predicted_tokens_per_s}",
    "error": "{throughput_error:+.0%}",
    "TPOT, ms": "{tpot_ms}",
    "predicted ": "{predicted_tpot_ms}",
    "error ": "{tpot_error:+.0%}",
}
ERRORS: Final = {
    "": "{what}",
    "points": "{points}",
    "within the bound": "{within} ({bound:.0f} %)",
    "median error": "{median:.1f} %",
    "p90": "{p90:.1f} %",
    "worst": "{worst:.1f} %",
}


def layout(result: Result) -> Iterator[TextTable]:
    """Yield the errors, and every point."""
    yield table(ERRORS, result["errors"])
    yield table(ROWS, result["rows"])


def draw(result: Result, figure: Figure) -> None:
    """Draw predicted against measured tokens per second, by link."""
    figure.set_size_inches(5, 5)
    axes, rows = figure.subplots(), result["rows"]
    for link in dict.fromkeys(row["engine"].split(", ")[1] for row in rows):
        own = [row for row in rows if row["engine"].endswith(link)]
        axes.plot(
            [row["tokens_per_s"] for row in own],
            [row["predicted_tokens_per_s"] for row in own],
            ".",
            label=link,
        )
    ends = [f(row["tokens_per_s"] for row in rows) for f in (min, max)]
    axes.plot(ends, ends, "k-", linewidth=0.5)
    axes.set(xscale="log", yscale="log", xlabel="measured, tokens/s", ylabel="predicted, tokens/s")
    axes.legend()


EXPERIMENT = Experiment("served", __doc__, layout, draw)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, predict, compare, and write the result."""
    parser = EXPERIMENT.parser(rounds=2)
    parser.add_argument("models", nargs="*", default=[DEFAULT_MODEL], metavar="MODEL")
    parser.add_argument(
        "--device", type=Path, required=True, metavar="FILE", help="this machine's profile"
    )
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args(argv)
    profile, rows = load_profile(args.device), list[dict[str, Any]]()
    with ended_by_signals():
        for name in args.models:
            for engine in ENGINES:
                for row in compare(
                    name, engine, profile, rounds=args.rounds, output_len=args.output_len
                ):
                    rows.append(row)
                    line = ", ".join(f"{each} {row[f'{each}_error']:+.0%}" for each in BOUNDS)
                    say(f"{row['model']}, {engine}, {row['requests']} at once: {line}")
    found = {"settings": settings_of(args), "errors": list(errors(rows)), "rows": rows}
    return EXPERIMENT.finish(args, found)


if __name__ == "__main__":
    raise SystemExit(main())
