"""Find the kernels' tiles on the GPU at hand: python -m benchmarks.gpu_kernels.tune.

Per shape of an op it times candidates and writes the best to kernels/tuned/<device>.json as
soon as they are found, where the kernels look for them; entries of other shapes there stay.
The tiles in use now are the first candidate, so what is written is never slower than they
were in the same run. --budget seconds are divided among the shapes. Takes a GPU; the search
itself has no clock. What can be tuned is in the modules tune_*.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from triton.errors import TritonError

from kernels.tiles import Table, table_path

DEFAULT_BUDGET_S: Final = 300.0


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


def search(target: Target, may_go_on: Callable[[], bool]) -> Found:
    """Give the fastest of what a target's stages propose, until `may_go_on` is False.

    Candidates that do not compile or run (too large for the device) are passed over.
    """
    before = target.time_of(target.start)
    best, best_time, tried = target.start, before, 0
    for propose in target.stages:
        for candidate in propose(best):
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
        target = task.make()
        found = search(target, lambda until=until: clock() < until)
        write_tiles(path, target.op, target.shape, found.tiles)
        print(
            f"{target.op} {target.shape}: {found.time_before:.4g} -> {found.time:.4g} "
            f"({found.tried} tried), {found.tiles}",
            flush=True,
        )
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Tune what the flags name, and print what it brought; returns the exit status."""
    from benchmarks.gpu_kernels.tune_attention import attention_tasks
    from benchmarks.gpu_kernels.tune_linear import linear_tasks
    from benchmarks.gpu_kernels.tune_mlp import QWEN3_30B, ROWS, Layer, mlp_tasks
    from benchmarks.gpu_kernels.tune_rows import norm_tasks, rotary_tasks
    from kernels.runtime import open_runtime
    from kernels.triton_grouped_mlp_weights import FORMATS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ops = ("attention", "grouped_mlp", "linear", "rms_norm", "rotate_and_store")
    parser.add_argument("--ops", nargs="+", choices=ops, default=list(ops))
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=["plain"])
    for name, default in QWEN3_30B._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET_S, help="seconds in all")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no GPU to tune for")
    runtime = open_runtime("cuda")
    layer = Layer(args.num_experts, args.top_k, args.hidden, args.ffn)
    tasks: list[Task] = []
    if "attention" in args.ops:
        tasks += attention_tasks(runtime)
    if "grouped_mlp" in args.ops:
        tasks += mlp_tasks(args.format, layer, args.rows, runtime.device)
    if "linear" in args.ops:
        tasks += linear_tasks(args.format, runtime)
    if "rms_norm" in args.ops:
        tasks += norm_tasks(runtime)
    if "rotate_and_store" in args.ops:
        tasks += rotary_tasks(runtime)
    path = table_path(torch.cuda.get_device_name(runtime.device))
    left_out = run(tasks, path, args.budget)
    if left_out:
        print(f"the time was up before: {', '.join(left_out)}")
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
