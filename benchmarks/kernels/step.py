"""The time of a decode step by the ops of its recording, each against its floor.

Lets a few sequences of a model in this process (benchmarks.local_model) decode for ever, recorded
and then layer by layer. The recorded program leaves the time at which each of its ops ended. An
op's floor is the time in which the machine reads its weights, at the bandwidth measured in the same
run; several rows may choose the same expert, which is counted for each. Run as
`topspin bench step`.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from benchmarks.experiment import Experiment, Result, TextTable, say, settings_of, table
from benchmarks.kernels.byte_floor import BITS
from benchmarks.kernels.cpu_kernel_cases import cache_bytes
from benchmarks.kernels.cpu_kernels import MATMUL_SIZE, PROBE_FILLS, Ceilings, Probe
from benchmarks.kernels.roofline import ceiling, weight_bytes
from benchmarks.local_model import BLOCK_SIZE, LocalModel
from kernels.cpu.compiled.matmul import experts, quantised, quantised_experts
from kernels.cpu.compiled.matmul import linear as matmul
from kernels.cpu.compiled.program import Program
from kernels.cpu.recorder import CpuRuntime
from kernels.cpu.simd.integers import CENTRED_BITS, GROUP, group_bytes
from kernels.cpu.simd.lanes import LANES
from models.sources.hub import DEFAULT_MODEL, resolve_model
from topspin.messages import StepResult
from topspin.plan.precision import LM_HEAD_FORMATS, PrecisionRule

# Steps of each kind that are not measured: caches fill, the second is recorded.
NUM_WARM_UP: Final = 4
NAMES: Final = {bits: name for name, bits in BITS.items()} | {CENTRED_BITS: "centred int4"}


class Decoding:
    """Sequences of a model in this process that decode for ever."""

    def __init__(self, args: argparse.Namespace) -> None:
        blocks_each = -(-(args.context + args.steps + NUM_WARM_UP + 2) // BLOCK_SIZE)
        rule = PrecisionRule(format=args.lm_head, part="lm_head") if args.lm_head else None
        model = LocalModel(
            resolve_model(args.model),
            num_blocks=blocks_each * args.rows,
            quantization=args.quantization,
            rules=() if rule is None else (rule,),
            num_threads=args.num_threads,
        )
        self._model, self._num_rows = model, args.rows
        self._context, self._blocks_each = args.context, blocks_each
        self.begin(recordings=True)

    def begin(self, *, recordings: bool) -> None:
        """Let new sequences decode, in the places of those before."""
        self._node = self._model.node(recordings=recordings)
        self._ids = [
            self._node.admit(
                [17 + row] * (self._context + 1),
                range(row * self._blocks_each, (row + 1) * self._blocks_each),
                num_computed=self._context,
            )
            for row in range(self._num_rows)
        ]

    @property
    def runtime(self) -> CpuRuntime:
        """Return what has the recording."""
        runtime = self._node.runtime
        assert isinstance(runtime, CpuRuntime), "the kernels of the CPU"
        return runtime

    def step(self) -> tuple[float, StepResult]:
        """Run a step; returns its seconds and its result."""
        return self._node.step(dict.fromkeys(self._ids, 1))


def label_of(kernel: str, block: np.ndarray) -> tuple[str, float]:
    """Return an op's name in the table, and the bytes of weights that it reads at one row."""

    def word(offset: int) -> int:
        return int(block[offset // 8])

    name = kernel.strip("_")
    if kernel == "_linear":
        num_in, num_out = word(matmul.NUM_INPUTS), word(matmul.NUM_OUTPUTS)
        return f"linear {num_in} to {num_out}", weight_bytes(num_out, num_in, 16)
    if kernel == "quantised_linear":
        num_in, num_out = word(quantised.L_INPUTS), word(quantised.L_OUTPUTS)
        bits = word(quantised.L_BITS)
        num_bytes = _quantised_bytes(num_out, num_in, bits)
        return f"{NAMES[bits]} linear {num_in} to {num_out}", num_bytes
    if kernel == "_multiply_heads":
        num_in, num_out = word(matmul.HEADS_INPUTS), word(matmul.HEADS_OUTPUTS)
        num_bytes = word(matmul.HEADS_COUNT) * weight_bytes(num_out, num_in, 16)
        return f"heads {num_in} to {num_out}", num_bytes
    if kernel in ("_experts", "_formed_experts"):
        shape = word(experts.HIDDEN_SIZE), word(experts.FFN_SIZE)
        pairs = word(experts.TOP_K) * word(experts.NUM_TOKENS)
        return name, 3 * pairs * weight_bytes(*shape, 16)
    if kernel in ("quantised_experts", "quantised_formed_experts"):
        shape = word(quantised_experts.E_WIDTH), GROUP * word(quantised_experts.E_UNITS)
        pairs = word(quantised_experts.E_CHOICES) * word(quantised_experts.E_ROWS)
        first = ctypes.c_int64.from_address(
            word(quantised_experts.E_TABLE) + quantised_experts.T_DOWN_BITS
        )
        return f"{NAMES[first.value]} experts", 3 * pairs * _quantised_bytes(*shape, first.value)
    return name, 0


def _quantised_bytes(num_out: int, num_in: int, bits: int) -> int:
    return num_out * -(-num_in // GROUP) * group_bytes(bits) // LANES


def per_op(program: Program, times: Sequence[np.ndarray]) -> dict[str, dict[str, float]]:
    """Return, by kind of op, calls, median microseconds in a step, and bytes."""
    ended = np.median([each[1:] - each[:-1] for each in times], axis=0)
    rows: dict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0, "us": 0.0, "bytes": 0})
    for idx, kernel in enumerate(program.kernels):
        name, num_bytes = label_of(kernel.name, program.blocks[idx])
        row = rows[name]
        row["calls"] += 1
        row["us"] += float(ended[idx - 1]) / 1e3 if idx else 0.0
        row["bytes"] += num_bytes
    return dict(rows)


def measure(node: Decoding, num_steps: int) -> dict[str, Any]:
    """Return the median times of a recorded step, of its phases and ops, and of a plain step."""
    found: dict[str, list[float]] = {"step": [], "layers": [], "sampling": []}
    times: list[np.ndarray] = []
    for _ in range(NUM_WARM_UP):
        node.step()
    program = next(iter(node.runtime.programs), None)
    if program is None:
        raise SystemExit("steps of this model are not recorded on this processor")
    clock = program.take_times()
    for _ in range(num_steps):
        seconds, result = node.step()
        found["step"].append(seconds)
        found["layers"].append(result.timings.attention_s)
        found["sampling"].append(result.timings.sample_s)
        times.append(clock.copy())
    ops = per_op(program, times)
    node.begin(recordings=False)
    plain = [node.step()[0] for _ in range(NUM_WARM_UP + num_steps)]
    found["layer by layer"] = plain[NUM_WARM_UP:]
    return {
        "ms": {name: round(statistics.median(each) * 1e3, 3) for name, each in found.items()},
        "ops": ops,
    }


def layout(result: Result) -> Iterator[TextTable | str]:
    """Yield a line per kind of op, then the step's."""
    rate = result["read_gb_per_s"] * 1e9
    columns = {
        "op": "{name}",
        "calls": "{calls}",
        "us each": "{each_us:.2f}",
        "us a step": "{us:.0f}",
        "MB": "{mb}",
        "floor us": "{floor_us}",
        "share": "{share}",
    }
    ops = sorted(result["ops"].items(), key=lambda item: -item[1]["us"])
    yield table(columns, (_op(name, row, rate) for name, row in ops))
    num_bytes = sum(row["bytes"] for row in result["ops"].values())
    total_us = sum(row["us"] for row in result["ops"].values())
    floor_ms = num_bytes / rate * 1e3
    yield (
        f"{num_bytes / 1e6:.0f} MB of weights take {floor_ms:.2f} ms at {rate / 1e9:.1f} GB/s; all "
        f"ops {total_us / 1e3:.2f} ms; "
        + ", ".join(f"{name} {each} ms" for name, each in result["ms"].items())
    )


def _op(name: str, row: Result, rate: float) -> Result:
    floor_us = row["bytes"] / rate * 1e6
    reads = {
        "mb": f"{row['bytes'] / 1e6:.1f}",
        "floor_us": f"{floor_us:.0f}",
        "share": f"{floor_us / row['us']:.0%}" if row["us"] else "-",
    }
    no_weights = dict.fromkeys(reads, "")
    each_us = row["us"] / row["calls"]
    return {"name": name, "each_us": each_us, **row, **(reads if row["bytes"] else no_weights)}


EXPERIMENT = Experiment("step", __doc__, layout)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the result."""
    parser = EXPERIMENT.parser(model=DEFAULT_MODEL)
    parser.add_argument(
        "--quantization",
        choices=("none", *BITS),
        default=None,
        help="of weights (default: as the checkpoint has them)",
    )
    parser.add_argument(
        "--lm-head",
        choices=LM_HEAD_FORMATS,
        default=None,
        help="format of the LM head, as by a rule of the engine plan (default: as --quantization)",
    )
    parser.add_argument("--rows", type=int, default=1, help="sequences (%(default)s)")
    parser.add_argument("--context", type=int, default=128, help="tokens (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="measured steps (%(default)s)")
    parser.add_argument("--num-threads", type=int, default=None)
    args = parser.parse_args(argv)
    found = Ceilings()
    say("loading")
    node = Decoding(args)
    probe = Probe(PROBE_FILLS * cache_bytes(), MATMUL_SIZE)
    probe.read(found)
    say("decoding")
    measured = measure(node, args.steps)
    for _ in range(5):
        probe.read(found)
    result = {
        "settings": settings_of(args, threads=torch.get_num_threads()),
        "read_gb_per_s": round(ceiling(found.bytes_per_s) / 1e9, 1),
        **measured,
    }
    return EXPERIMENT.finish(args, result)


if __name__ == "__main__":
    raise SystemExit(main())
