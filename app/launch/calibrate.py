"""`--layout auto`: measures the layouts of one attention and one expert node, and chooses.

Owns the candidates, the choice, the line that explains it, and the cache of choices (per machine,
model shape, settings and version, in the user's cache). The candidates are measured by
app.launch.trial, a separate process. Knows no tensors. Called by `topspin serve` before it
starts anything.

Separate processes are the purpose of Topspin (a node can be lost, moved or doubled), so one process
must be MIN_GAIN faster. The default holds, unmeasured, if there is no choice or a measurement would
mean nothing (see _reason_against); it also holds if measuring fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from app.launch.commands import import_path, module_argv
from app.launch.display import CompiledKernels, open_display
from deploy.placement.shapes import ModelShape, precision_by
from models.description.config import ModelConfig
from models.sources.hub import cache_root
from topspin import __version__
from topspin.cores import DEFAULT_LAYOUT, Between, LayoutChoice, node_environment, split_cores
from topspin.errors import TopspinError
from topspin.plan.precision import Rules
from topspin.plan.setting import AUTO
from topspin.plan.spec import EnginePlan, NodeConfig
from topspin.process import PARENT_PID_VARIABLE

# Loading takes 2 s. The first time it compiles kernels too, which the nodes need anyway: every
# compiled kernel is kept and renews the limit, so that no work is lost.
LOAD_LIMIT_S = 15.0
MEASURE_LIMIT_S = 6.0
MIN_GAIN = 0.10
# Within this the simpler candidate (the earlier one) is taken.
MARGIN = 0.03
# From this number of cores, half as many threads are tried too: two may share a real core.
MANY_CORES = 4
# Above this a layer's experts take long to read (a trial of 400 MiB took 17 s), and a hand-over
# between processes is short beside them: the default was as fast as one process.
MAX_LAYER_BYTES = 256 * 2**20

Settle = Callable[[LayoutChoice | None], EnginePlan]
Measure = Callable[[Sequence["LayoutCandidate"]], list[float]]


class CalibrationError(TopspinError):
    """A candidate could not be measured."""


class CandidateNode(msgspec.Struct, frozen=True):
    """The threads of a node, and the cores that are its own (empty: it shares all)."""

    num_threads: int
    cores: tuple[int, ...] = ()


class LayoutCandidate(msgspec.Struct, frozen=True):
    """A layout to try, as app.launch.trial reads it: the attention and the expert node."""

    choice: LayoutChoice
    config: NodeConfig
    nodes: tuple[CandidateNode, CandidateNode]


def choose_layout(
    asked: Mapping[str, Any],
    model: ModelConfig,
    path: Path,
    settle: Settle,
    *,
    emit: Callable[[str], None],
    measure: Measure | None = None,
    cores: Sequence[int] | None = None,
    cache: Path | None = None,
) -> LayoutChoice | None:
    """Return the layout for the settings `asked`, None for the default; `emit` gets one line.

    `path` is the checkpoint's directory, `model` its shapes. `settle` gives the plan of a choice
    (None: the default).
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    choices, plan = _choices(asked, len(cores)), settle(None)
    if reason := _reason_against(plan, model, len(cores)):
        emit(f"layout: {DEFAULT_LAYOUT}, the default ({reason})")
        return None
    cache = (cache_root() / "layouts.json") if cache is None else cache
    key = _key(plan, choices, path, cores)
    known = _read(cache)
    if (chosen := known.get(key)) is not None:
        emit(f"layout: {_describe(chosen, cores)} (measured before: {cache}){_others(chosen)}")
        return chosen
    started = time.monotonic()
    try:
        candidates = [_candidate(each, settle, path, cores) for each in choices]
        times = (measure or measure_all)(candidates)
    except CalibrationError as error:
        emit(f"layout: {DEFAULT_LAYOUT}, the default (not measured: {error})")
        return None
    chosen = _choose(dict(zip(choices, times, strict=True)))
    took_s = time.monotonic() - started
    others = [
        f"{step_s / times[choices.index(chosen)]:.2f}x with {_describe(each, cores)}"
        for each, step_s in zip(choices, times, strict=True)
        if each != chosen
    ]
    against = f"; a step takes {', '.join(others)}" if others else ""
    emit(
        f"layout: {_describe(chosen, cores)} (measured in {took_s:.1f} s{against}){_others(chosen)}"
    )
    _write(cache, known | {key: chosen})
    return chosen


def _reason_against(plan: EnginePlan, model: ModelConfig, num_cores: int) -> str | None:
    """Return the reason not to measure, None if there is none."""
    if any(node.place.is_device for node in plan.nodes):
        return "only nodes on the CPU are measured"
    if (len(plan.attention), len(plan.experts)) != (1, 1):
        return "measured for one attention and one expert node only"
    if plan.link.transport not in ("shm", "tcp"):
        return f"nothing to choose with --transport {plan.link.transport}"
    if plan.link.latency_us or plan.link.gbps:
        return "the link is emulated"
    if num_cores < 2:
        return "one core"
    if expert_layer_bytes(plan.model.dtype, plan.precision, model) > MAX_LAYER_BYTES:
        return "the experts are so large that hand-overs do not count"
    return None


def expert_layer_bytes(dtype: str, precision: Rules, model: ModelConfig) -> int:
    """Return the size of the first MoE layer's routed experts in their formats."""
    shape, layer = ModelShape.from_config(model, dtype=dtype), model.moe_layers[0]
    weight_format = precision_by(precision)("experts", layer)
    return shape.num_experts * shape.weight_bytes("experts", layer, weight_format)


def _choices(asked: Mapping[str, Any], num_cores: int) -> list[LayoutChoice]:
    """Return the choices, the simplest first."""
    told = asked.get("transport") or AUTO
    transport: Between = "tcp" if told == "tcp" else "shm"
    counts = [asked.get("num_threads")]
    if num_cores >= MANY_CORES and counts == [None]:
        counts.append(num_cores // 2)
    choices = [LayoutChoice("shared", transport, threads) for threads in counts]
    choices.append(LayoutChoice("split", transport))
    if told == AUTO:
        choices += [LayoutChoice("shared", "local", threads) for threads in counts]
    return choices


def _candidate(
    choice: LayoutChoice, settle: Settle, path: Path, cores: Sequence[int]
) -> LayoutCandidate:
    config = settle(choice).for_node()
    model = msgspec.structs.replace(config.model, path=str(path))
    config = msgspec.structs.replace(config, model=model)
    if choice.layout == "split":
        first, second = (
            CandidateNode(min(config.node.num_threads or len(share), len(share)), share)
            for share in split_cores(cores, 2)
        )
        return LayoutCandidate(choice, config, (first, second))
    node = CandidateNode(_num_threads(choice, cores))
    return LayoutCandidate(choice, config, (node, node))


def _others(choice: LayoutChoice) -> str:
    """Return where attention and experts run, and how a user has them run otherwise."""
    if choice.transport == "local":
        return "; --transport shm gives attention and experts a process each"
    return "; attention and experts have a process each, --transport local puts them in one"


def _num_threads(choice: LayoutChoice, cores: Sequence[int]) -> int:
    own = os.environ.get("OMP_NUM_THREADS", "")
    return choice.num_threads or (int(own) if own.isdecimal() else len(cores))


def _choose(times: dict[LayoutChoice, float]) -> LayoutChoice:
    """Return the fastest; one process only if separate ones cost MIN_GAIN or more."""

    def fastest(choices: list[LayoutChoice]) -> LayoutChoice:
        best_s = min(times[choice] for choice in choices)
        return next(choice for choice in choices if times[choice] <= best_s * (1 + MARGIN))

    separate = fastest([choice for choice in times if choice.transport != "local"])
    if alone := [choice for choice in times if choice.transport == "local"]:
        best = fastest(alone)
        if times[separate] >= times[best] * (1 + MIN_GAIN):
            return best
    return separate


def _describe(choice: LayoutChoice, cores: Sequence[int]) -> str:
    if choice.layout == "split":
        threads = "+".join(str(len(share)) for share in split_cores(cores, 2))
        return f"split, {threads} threads"
    name = "one process" if choice.transport == "local" else choice.layout
    return f"{name}, {_num_threads(choice, cores)} threads"


def measure_all(candidates: Sequence[LayoutCandidate]) -> list[float]:
    """Return the seconds of a decode step of each candidate; raises CalibrationError."""
    spin_count = candidates[0].config.execution.spin_count
    process = subprocess.Popen(
        module_argv("app.launch.trial"),
        bufsize=0,
        env={
            **os.environ,
            **import_path(os.environ),
            **node_environment(os.environ, spin_count=spin_count),
            PARENT_PID_VARIABLE: str(os.getpid()),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    answers = _Answers(process)
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer raises the error
            process.stdin.write(msgspec.json.encode(candidates) + b"\n")
        answers.next(LOAD_LIMIT_S)
        return msgspec.json.decode(answers.next(MEASURE_LIMIT_S), type=list[float])
    finally:
        answers.finish()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class _Answers:
    """The trial's answers, one a line; progress is shown while they are awaited."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._out, self._err = process.stdout, process.stderr
        self._display = open_display()
        self._kernels = CompiledKernels(self._keep)
        self._last_line = "the trial ended without a word"
        self._started = time.monotonic()

    def next(self, limit_s: float) -> bytes:
        """Return the next answer, due `limit_s` after the call or the last compiled kernel.

        Raises CalibrationError with the trial's last line.
        """
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            elapsed_s = time.monotonic() - self._started
            self._display.progress(self._kernels.state("measuring layouts, once"), elapsed_s)
            ready, _, _ = select.select([self._out, self._err], [], [], min(left_s, 0.2))
            text = self._err.readline() if self._err in ready else b""
            if text:
                if self._kernels.line(text.decode(errors="replace").strip()):
                    deadline = time.monotonic() + limit_s
            elif self._out in ready:
                answer = self._out.readline()
                if not answer:
                    raise CalibrationError(self._last_line)
                return answer
        raise CalibrationError("it takes too long on this machine as it is now")

    def _keep(self, text: str) -> None:
        """Keep a line of the trial's log that does not report a compiled kernel."""
        self._last_line = text or self._last_line

    def finish(self) -> None:
        """End the progress."""
        self._display.finish()


def _key(
    plan: EnginePlan, choices: Sequence[LayoutChoice], path: Path, cores: Sequence[int]
) -> str:
    """Return the name of a measurement: of all that the time of a step depends on."""
    shapes = (path / "config.json").read_bytes()
    facts = (
        hashlib.sha256(shapes).hexdigest(),
        (plan.model.dtype, plan.precision, plan.link, plan.execution, choices),
        [(node.kernels, node.wait) for node in plan.nodes],
        sorted((name, value) for name, value in os.environ.items() if name.startswith("OMP_")),
        (tuple(cores), _processor(), platform.release(), __version__),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's name: hosts that share a cache directory may differ."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith("model name")), "")
    return ""


def _read(cache: Path) -> dict[str, LayoutChoice]:
    try:
        return msgspec.json.decode(cache.read_bytes(), type=dict[str, LayoutChoice])
    except (OSError, msgspec.DecodeError):
        return {}


def _write(cache: Path, choices: dict[str, LayoutChoice]) -> None:
    with contextlib.suppress(OSError):  # without a cache the next start measures again
        cache.parent.mkdir(parents=True, exist_ok=True)
        fresh = cache.with_name(f"{cache.name}.{os.getpid()}")
        fresh.write_text(json.dumps(choices, indent=1) + "\n")
        fresh.replace(cache)
