"""M2N's speed against general-purpose collectives and message queues, in one run.

Owns the grid (backends x M x N x message size), the processes (each pinned to a core), the timing,
and the report: round-trip p50/p99 and throughput with four messages in flight, as JSON, a table,
ratios, and a plot. m2n_backends does the exchanges. Backends take turns within every
round. Run as `topspin bench m2n`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import zmq

from app.cli.keys import make
from benchmarks.experiment import Experiment, Result, TextTable, number, rounds_in_turn, say
from benchmarks.transport.m2n_backends import (
    DEPTH,
    NUM_LAYERS,
    ROW_BYTES,
    AllToAllPlayer,
    ExchangeCase,
    GlooPlayer,
    Player,
    ZmqPlayer,
    local_attention,
    open_listener,
    our_attention,
    our_expert,
    zmq_connect,
    zmq_listen,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = ("shm spin", "shm", "tcp spin", "tcp", "tcp keys", "nixl spin", "nixl", "local")
BASELINES = ("gloo", "gloo all_to_all", "zmq ipc", "zmq tcp")
SIZES = (4096, 16384, 65536, 262144, 1048576, 4194304)
TOPOLOGIES = ("1x1", "2x2", "4x4")
TARGET_BYTES = 65536
TRIPS = 120
ROUNDS = 3
WARM_UP = 4 * NUM_LAYERS
# Bytes that all pairs together move in one direction in one round's trips, and in its burst.
ROUND_BYTES = 128 * 2**20


def num_trips(case: ExchangeCase) -> int:
    """Return the number of round trips timed in one round."""
    return _whole_steps(min(TRIPS, ROUND_BYTES // _trip_bytes(case)))


def num_bursts(case: ExchangeCase) -> int:
    """Return the number of turns of DEPTH messages to every peer timed in one round."""
    return _whole_steps(min(64, ROUND_BYTES // (_trip_bytes(case) * DEPTH)))


def _trip_bytes(case: ExchangeCase) -> int:
    return case.rows * ROW_BYTES * case.num_attention * case.num_experts


def _whole_steps(count: int) -> int:
    return max(1, count // NUM_LAYERS) * NUM_LAYERS


class ExchangeNode:
    """One node process: opens its net, plays a case, and reports the times."""

    def __init__(self, pipe: Connection, core: int) -> None:
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)
        torch.manual_seed(core)
        self._pipe = pipe
        self._context: zmq.Context[Any] = zmq.Context()
        self._listening: Any = None

    def run(self) -> None:
        """Carry out commands from the pipe until stop."""
        while (message := self._pipe.recv()) != "stop":
            name, *arguments = message
            self._pipe.send(getattr(self, name)(*arguments))
        self._context.destroy(1000)

    def listen(self, case: ExchangeCase) -> str:
        """Return the address of an expert node of `case`."""
        if case.backend.startswith("gloo"):
            return ""
        if case.backend.startswith("zmq"):
            name, self._listening = zmq_listen(case, self._context)
            return name
        self._listening = open_listener(case)
        return str(self._listening.address)

    @torch.inference_mode()
    def play(
        self, case: ExchangeCase, role: str, index: int, addresses: list[str]
    ) -> tuple[list[float], float]:
        """Play one node of `case`; returns the trips' seconds and the burst's."""
        player = self._open(case, index, addresses, attention=role == "attention")
        trips, turns = num_trips(case), num_bursts(case)
        for _ in range(min(trips, WARM_UP)):
            player.trip()
        seconds = []
        for _ in range(trips):
            start_s = time.perf_counter()
            player.trip()
            seconds.append(time.perf_counter() - start_s)
        if turns > NUM_LAYERS:
            player.burst(NUM_LAYERS)
        start_s = time.perf_counter()
        player.burst(turns)
        burst_s = time.perf_counter() - start_s
        player.close()
        return seconds, burst_s

    def _open(
        self, case: ExchangeCase, index: int, addresses: list[str], *, attention: bool
    ) -> Player:
        listening, self._listening = self._listening, None
        match case.backend:
            case "gloo":
                return GlooPlayer(case, attention=attention, index=index)
            case "gloo all_to_all":
                return AllToAllPlayer(case, attention=attention, index=index)
            case "zmq ipc" | "zmq tcp":
                sockets = zmq_connect(self._context, index, addresses) if attention else listening
                return ZmqPlayer(case, attention=attention, sockets=sockets)
            case "local":
                return local_attention(case)
        if attention:
            return our_attention(case, index, addresses)
        return our_expert(case, index, listening)


def _node_main(pipe: Connection, core: int) -> None:
    ExchangeNode(pipe, core).run()


@contextmanager
def _nodes(count: int) -> Iterator[list[Connection]]:
    """Start `count` pinned processes and stop them afterwards."""
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    cores = sorted(os.sched_getaffinity(0))
    pipes, processes = [], []
    for index in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_node_main, args=(theirs, cores[index % len(cores)]), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send("stop")
        for process in processes:
            process.join(10.0)


def _measure(case: ExchangeCase, pipes: list[Connection]) -> tuple[list[float], float]:
    """Play `case`; returns every attention node's trips and the slowest one's burst."""
    if case.backend == "local":
        pipes[0].send(("play", case, "attention", 0, []))
        return pipes[0].recv()  # type: ignore[no-any-return]
    m, n = case.num_attention, case.num_experts
    experts, attention = pipes[m : m + n], pipes[:m]
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        make(keys, ("attention", "expert"))
        case = replace(case, rendezvous=str(Path(folder) / "rendezvous"), keys=str(keys))
        for pipe in experts:
            pipe.send(("listen", case))
        addresses = [pipe.recv() for pipe in experts]
        for role, pipes_of in (("expert", experts), ("attention", attention)):
            for index, pipe in enumerate(pipes_of):
                pipe.send(("play", case, role, index, addresses))
        answers = [pipe.recv() for pipe in (*attention, *experts)][:m]
    return list(itertools.chain(*(seconds for seconds, _ in answers))), max(s for _, s in answers)


def _row(case: ExchangeCase, rounds: Sequence[tuple[list[float], float]]) -> dict[str, Any]:
    size = case.rows * ROW_BYTES
    trips = [each for seconds, _ in rounds for each in seconds]
    bursts = [burst_s for _, burst_s in rounds]
    cuts = statistics.quantiles(trips, n=100)
    moved = 2 * _trip_bytes(case) * num_bursts(case) * DEPTH
    return {
        "backend": case.backend,
        "topology": f"{case.num_attention}x{case.num_experts}",
        "message_bytes": size,
        "num_round_trips": len(trips),
        "p50_us": round(cuts[49] * 1e6, 1),
        "p99_us": round(cuts[98] * 1e6, 1),
        "gb_per_s": round(moved / statistics.median(bursts) / 1e9, 6),
    }


def backends_of(num_attention: int, num_experts: int, wanted: Sequence[str]) -> list[str]:
    """Return the backends for this topology: spinning needs a core for each node."""
    cores = len(os.sched_getaffinity(0))
    crowded = num_attention + num_experts > cores
    has_nixl = importlib.util.find_spec("nixl") is not None
    return [
        name
        for name in wanted
        if not (name.endswith(" spin") and crowded)
        and not (name.startswith("nixl") and not has_nixl)
        and not (name == "local" and num_attention > 1)
    ]


def run(
    topologies: Sequence[str], sizes: Sequence[int], backends: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """Measure the whole grid and return a row per cell; `rounds` are those of 1x1.

    Larger topologies take fewer rounds: nodes share the cores, and a round has more samples.
    """
    rows = []
    start_s = time.monotonic()
    for topology in topologies:
        m, n = (int(part) for part in topology.split("x"))
        with _nodes(m + n) as pipes:
            for size in sizes:
                cases = [
                    ExchangeCase(
                        backend=name, num_attention=m, num_experts=n, rows=size // ROW_BYTES
                    )
                    for name in backends_of(m, n, backends)
                ]
                found = rounds_in_turn(
                    {case.backend: case for case in cases},
                    lambda case, _: _measure(case, pipes),
                    rounds=max(2, 2 * rounds // (m + n)),
                    warm_ups=0,
                )
                rows += [_row(case, [each[case.backend] for each in found]) for case in cases]
                elapsed_s = time.monotonic() - start_s
                say(f"{topology}, {size // 1024} KB: done after {elapsed_s:.0f} s")
    return rows


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures that have targets, as far as the grid has them."""
    cell = {(r["topology"], r["message_bytes"], r["backend"]): r for r in rows}
    found: dict[str, float] = {}

    def compare(name: str, size: int, ours: str, theirs: str, field: str) -> None:
        a, b = cell.get(("1x1", size, ours)), cell.get(("1x1", size, theirs))
        if a and b:
            top, bottom = (b, a) if field == "p50_us" else (a, b)
            found[name] = round(top[field] / bottom[field], 2)

    for wait in ("shm spin", "shm"):
        compare(f"gloo p50 / {wait} p50 at 64 KB", TARGET_BYTES, wait, "gloo", "p50_us")
        compare(f"{wait} / gloo throughput at 256 KB", 262144, wait, "gloo", "gb_per_s")
    for size in SIZES:
        compare(f"gloo p50 / tcp p50 at {size // 1024} KB", size, "tcp", "gloo", "p50_us")
    return found


def layout(result: Result) -> Iterator[TextTable]:
    """Yield round trips and throughput, a column per backend."""
    backends = list(dict.fromkeys(row["backend"] for row in result["rows"]))
    found = {(row["topology"], row["message_bytes"], row["backend"]): row for row in result["rows"]}
    sizes = list(dict.fromkeys((topology, size) for topology, size, _ in found))

    def rows(cell: Callable[[Result], str]) -> list[list[str]]:
        return [
            [
                f"{topology}, {size // 1024} KB",
                *(cell(found.get((topology, size, each), {})) for each in backends),
            ]
            for topology, size in sizes
        ]

    def trip(row: Result) -> str:
        return f"{number(row['p50_us'])} / {number(row['p99_us'])}" if row else "-"

    yield TextTable(["round trip, p50 / p99 us", *backends], rows(trip))
    yield TextTable(
        ["four in the air, GB/s", *backends], rows(lambda row: number(row.get("gb_per_s")))
    )


def draw(result: Result, figure: Figure) -> None:
    """Draw p50 and throughput over message size, a column per topology."""
    rows = result["rows"]
    topologies = list(dict.fromkeys(row["topology"] for row in rows))
    figure.set_size_inches(4.5 * len(topologies), 7)
    axes = figure.subplots(2, len(topologies), squeeze=False, sharex=True, sharey="row")
    for column, topology in enumerate(topologies):
        for name in dict.fromkeys(row["backend"] for row in rows):
            mine = [r for r in rows if r["topology"] == topology and r["backend"] == name]
            sizes = [row["message_bytes"] / 1024 for row in mine]
            style = "--" if name in BASELINES else "-"
            for line, key in enumerate(("p50_us", "gb_per_s")):
                axes[line, column].plot(
                    sizes, [r[key] for r in mine], style, marker=".", label=name
                )
        axes[0, column].set(title=f"{topology}", xscale="log", yscale="log")
        axes[1, column].set(xlabel="message, KB", xscale="log", yscale="log")
    axes[0, 0].set_ylabel("round trip p50, us")
    axes[1, 0].set_ylabel("throughput, GB/s")
    axes[0, 0].legend(fontsize="small")


EXPERIMENT = Experiment("m2n", __doc__, layout, draw)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid of the flags, print it, and write JSON and plot."""
    parser = EXPERIMENT.parser(rounds=ROUNDS)
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES, metavar="MxN")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="BYTES")
    every = OURS + BASELINES
    parser.add_argument("--backends", nargs="+", choices=every, default=every, metavar="NAME")
    args = parser.parse_args(argv)
    rows = run(args.topologies, args.sizes, args.backends, args.rounds)
    return EXPERIMENT.finish(args, {"rows": rows, "ratios": ratios(rows)})


if __name__ == "__main__":
    raise SystemExit(main())
