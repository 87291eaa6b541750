"""Find the kernels' tiles on the GPU at hand: python -m benchmarks.gpu_kernels.tune.

Several processes compile the candidates; then, per shape of an op, they are timed and the best
is written to kernels/tuned/<device>.json as soon as it is found, where the kernels look for it;
entries of other shapes there stay. The tiles in use now are the first candidate, so what is
written is never slower than they were in the same run. --budget seconds are divided among the
shapes. Takes a GPU; the search itself has no clock. What can be tuned is in the modules tune_*.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from triton.errors import TritonError

from benchmarks import gpu_compile
from benchmarks.gpu_compile import CompilingRuntime, num_compilers, only_compiling, read_share
from benchmarks.gpu_kernels.grouped_mlp import QWEN3_30B, ROWS, Layer
from kernels.runtime import Runtime, open_runtime
from kernels.triton.grouped_mlp.weights import FORMATS
from kernels.triton.tiles import Table, table_path

DEFAULT_BUDGET_S: Final = 480.0
COMPILING_SHARE: Final = 0.4
MAX_COMPILERS: Final = 14
REPLAYS: Final = 5
"""Of a candidate: there are thousands."""
OPS: Final = ("attention", "grouped_mlp", "linear", "rms_norm", "rotate_and_store")


@dataclass(frozen=True, eq=False)
class Target:
    """One op at one shape. Tiles are a frozen dataclass of the op's module."""

    op: str
    shape: str
    """The key of the table."""
    start: Any
    """The tiles in use."""
    stages: Sequence[Callable[[Any], Iterable[Any]]]
    """Each proposes candidates, given the best tiles of the stage before."""
    time_of: Callable[[Any], float]
    """The time of a call with these tiles; raises TritonError if they do not run."""
    keep: Callable[[Any], None] = field(default=lambda _: None)
    """Told of the best tiles: what is tuned next may be timed beside them."""


@dataclass(frozen=True)
class Task:
    """A target that is made when its turn comes, because it takes memory."""

    name: str
    make: Callable[[], Target]


class Found(NamedTuple):
    """The best tiles, their time, that of the tiles before, and how many were tried."""

    tiles: Any
    time: float
    time_before: float
    tried: int


def shuffled(candidates: Iterable[Any]) -> list[Any]:
    """Give them in an order that does not depend on what they are, the same one every time."""
    found = list(candidates)
    random.Random(0).shuffle(found)
    return found


def search(target: Target, may_go_on: Callable[[], bool]) -> Found:
    """Give the fastest of what a target's stages propose, until `may_go_on` is False.

    Candidates that do not compile or run (too large for the device) are passed over.
    """
    before = target.time_of(target.start)
    best, best_time, tried = target.start, before, 0
    for propose in target.stages:
        # Should the time be short, what was tried is a fair part of all.
        for candidate in shuffled(propose(best)):
            if not may_go_on():
                break
            tried += 1
            # The compiler's passes raise RuntimeError where they cannot cope.
            try:
                found = target.time_of(candidate)
            except (TritonError, RuntimeError) as error:
                print(f"  {candidate}: {type(error).__name__}")
                continue
            if found < best_time:
                best, best_time = candidate, found
    target.keep(best)
    return Found(best, best_time, before, tried)


def write_tiles(path: Path, op: str, shape: str, tiles: Any) -> None:
    """Add the tiles of an op and shape to a file, or make it."""
    table: Table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    table.setdefault(op, {})[shape] = asdict(tiles)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def run(
    tasks: Sequence[Task],
    path: Path,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Tune the tasks in order, each with its share of what is left; give those left out."""
    end = clock() + budget_s
    for idx, task in enumerate(tasks):
        left = end - clock()
        if left <= 0:
            return [later.name for later in tasks[idx:]]
        until = clock() + left / (len(tasks) - idx)
        # The tiles in use may not run here either; the other shapes' count still.
        try:
            target = task.make()
            found = search(target, lambda until=until: clock() < until)
        except (TritonError, RuntimeError) as error:
            print(f"{task.name}: {type(error).__name__}: {error}", flush=True)
            continue
        write_tiles(path, target.op, target.shape, found.tiles)
        print(
            f"{target.op} {target.shape}: {found.time_before:.4g} -> {found.time:.4g} "
            f"({found.tried} tried), {found.tiles}",
            flush=True,
        )
    return []


def compile_candidates(tasks: Iterable[Task], share: slice, seconds: float) -> int:
    """Compile a share of what the tasks' stages propose, and run none; give their number.

    What a stage proposes once the one before it has found something is compiled in its turn.
    """
    end, tried = time.monotonic() + seconds, 0
    for task in tasks:
        with only_compiling():
            target = task.make()
            proposed = [each for stage in target.stages for each in stage(target.start)]
            for candidate in shuffled(proposed)[share]:
                if time.monotonic() >= end:
                    return tried
                tried += 1
                # Whoever times it will meet the same error, and pass it over.
                with contextlib.suppress(TritonError, RuntimeError):
                    target.time_of(candidate)
    return tried


def make_tasks(args: argparse.Namespace, runtime: Runtime) -> list[Task]:
    """Give the tasks of the ops that the flags name."""
    from benchmarks.gpu_kernels import tune_attention, tune_linear, tune_mlp, tune_rows

    layer = Layer(args.num_experts, args.top_k, args.hidden, args.ffn)
    tasks_of: dict[str, Callable[[], list[Task]]] = {
        "attention": lambda: tune_attention.attention_tasks(runtime),
        "grouped_mlp": lambda: tune_mlp.mlp_tasks(args.format, layer, args.rows, runtime),
        "linear": lambda: tune_linear.linear_tasks(args.format, runtime),
        "rms_norm": lambda: tune_rows.norm_tasks(runtime),
        "rotate_and_store": lambda: tune_rows.rotary_tasks(runtime),
    }
    return [task for op in OPS if op in args.ops for task in tasks_of[op]()]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=["plain"])
    for name, default in QWEN3_30B._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds in all")
    parser.add_argument("--share", help="I/N: only compile the I-th of N shares")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no GPU to tune for")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Tune what the flags name, and print what it brought; returns the exit status."""
    args = parse(argv)
    end = time.monotonic() + args.budget
    runtime = open_runtime("cuda")
    if args.share is not None:
        compiling = CompilingRuntime(runtime.device)
        compile_candidates(make_tasks(args, compiling), read_share(args.share), args.budget)
        return 0
    flags = list(sys.argv[1:] if argv is None else argv)
    count, seconds = num_compilers(MAX_COMPILERS), args.budget * COMPILING_SHARE
    print(f"compiling in {count} processes, for {seconds:.0f} s at most", flush=True)
    gpu_compile.compile_beside(["-m", "benchmarks.gpu_kernels.tune", *flags], count, seconds)
    path = table_path(torch.cuda.get_device_name(runtime.device))
    left_out = run(make_tasks(args, runtime), path, end - time.monotonic())
    if left_out:
        print(f"the time was up before: {', '.join(left_out)}")
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
