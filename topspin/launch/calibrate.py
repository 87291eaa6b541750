"""`--layout auto`: measures a few layouts for some seconds and takes the fastest.

Owns the candidates, the choice, what is said about it, and the cache of choices (per model
shape, dtype, topology, machine and versions, in the user's cache). What a candidate costs
comes from topspin.launch.calibration_node, a process per candidate. Called by `topspin serve`
before it starts anything; knows no roles.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from models.hub import cache_root
from topspin import __version__
from topspin.config import EngineConfig
from topspin.cores import CORES_VARIABLE, SPIN_COUNT, Layout, NodeCores, assign_cores
from topspin.devices import CPU
from topspin.errors import TopspinError

CANDIDATE_TIMEOUT_S = 60.0
# What a candidate must win by: within this, the simpler one (it comes first) is taken.
_MARGIN = 0.03
# Beside the usual count: long spins for a process that has the cores to itself or a share of
# them, hardly any for those that take turns.
_LONG_SPIN, _BRIEF_SPIN = 50_000, 300
# With so many cores, half as many threads are tried too: they may be halves of real cores.
_MANY_CORES = 4

Between = Literal["local", "shm", "tcp"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout to try: where attention and experts run, and on which cores."""

    layout: Layout
    transport: Between
    nodes: tuple[NodeCores, ...]

    def __str__(self) -> str:
        """Return what a person calls it."""
        spin = f"OpenMP spin count {self.nodes[0].spin_count}"
        if self.transport == "local":
            return f"one process, {self.nodes[0].num_threads} threads, {spin}"
        wait = "spin" if self.layout == "split" else "block"
        threads = "+".join(str(node.num_threads) for node in self.nodes)
        return f"{self.layout} cores over {self.transport}, {threads} threads, {wait}, {spin}"


Measure = Callable[[EngineConfig, Candidate], float]


def candidates(config: EngineConfig, cores: Sequence[int]) -> list[Candidate]:
    """Return what may be chosen for `config`, the simplest first.

    One process is only a candidate while --transport is auto and the topology is 1x1.
    """
    topology = config.topology
    transport = config.m2n.transport
    is_pair = (topology.attention_nodes, topology.expert_nodes) == (1, 1)
    between: Between = "tcp" if transport == "tcp" else "shm"
    found = []
    for threads in _thread_counts(config.compute.num_threads, len(cores)):
        [alone] = assign_cores("shared", num_nodes=1, cores=cores, num_threads=threads)
        if transport == "auto" and is_pair:
            for spin in _spin_counts(config, alone, _LONG_SPIN):
                found.append(Candidate("shared", "local", (replace(alone, spin_count=spin),)))
        for spin in _spin_counts(config, alone, _BRIEF_SPIN):
            taking_turns = replace(alone, spin_count=spin)
            found.append(Candidate("shared", between, (taking_turns, taking_turns)))
    if topology.attention_nodes + topology.expert_nodes <= len(cores):
        own = assign_cores(
            "split", num_nodes=2, cores=cores, num_threads=config.compute.num_threads
        )
        for spin in _spin_counts(config, own[0], _LONG_SPIN):
            nodes = tuple(replace(node, spin_count=spin) for node in own)
            found.append(Candidate("split", between, nodes))
    return found


def _thread_counts(asked: int | None, num_cores: int) -> list[int]:
    if asked is not None:
        return [asked]
    return [num_cores, num_cores // 2] if num_cores >= _MANY_CORES else [num_cores]


def _spin_counts(config: EngineConfig, node: NodeCores, other: int) -> list[int]:
    """Return the usual count and `other`; one thread waits for nobody."""
    if config.compute.spin_count is not None:
        return [config.compute.spin_count]
    return [SPIN_COUNT, other] if node.num_threads > 1 else [SPIN_COUNT]


def calibrate(
    config: EngineConfig,
    *,
    emit: Callable[[str], None],
    measure: Measure | None = None,
    cores: Sequence[int] | None = None,
    cache: Path | None = None,
) -> EngineConfig:
    """Return `config` with its layout (and transport, if auto) chosen; `emit` gets the reasons.

    Without experts, with one core, and with transports that it cannot try, the layout is
    "shared". A candidate that fails is left out; if all fail, too. So it is with a GPU: what is
    measured here are cores.
    """
    if config.nodes.attention.is_device or config.nodes.experts.is_device:
        emit("layout: shared (only nodes on the CPU have layouts to choose from)")
        compute = msgspec.structs.replace(config.compute, layout="shared")
        return msgspec.structs.replace(config, compute=compute)
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    if config.m2n.transport in ("local", "nixl") or not config.topology.expert_nodes:
        emit("layout: shared (nothing to choose)")
        return _with(config, Candidate("shared", "shm", ()))
    tried = candidates(config, cores)
    cache = (cache_root() / "layouts.json") if cache is None else cache
    key = _key(config, cores)
    known = _read(cache)
    if key in known and (chosen := _named(tried, known[key])) is not None:
        emit(f"layout: {chosen} (measured before; remove {cache} to measure again)")
        return _with(config, chosen)
    times: dict[str, float] = {}
    for candidate in tried:
        try:
            times[str(candidate)] = (measure or run_candidate)(config, candidate)
        except TopspinError as error:
            emit(f"layout: {candidate} is out: {error}")
    if not times:
        return _with(config, Candidate("shared", "shm", ()))
    best = min(times.values())
    chosen = next(c for c in tried if times.get(str(c), best * 2) <= best * (1 + _MARGIN))
    for name, step_ms in times.items():
        emit(f"layout: {name}: {step_ms:.2f} ms per trial step ({step_ms / best:.2f}x)")
    emit(f"layout: {chosen} is taken")
    _write(cache, known | {key: str(chosen)})
    return _with(config, chosen)


class CalibrationError(TopspinError):
    """A candidate could not be measured."""


def run_candidate(config: EngineConfig, candidate: Candidate) -> float:
    """Time `candidate` in a process of its own; returns milliseconds per trial step."""
    first = candidate.nodes[0]
    environment = {**os.environ, **first.environment(os.environ)}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).resolve().parents[2]), environment.get("PYTHONPATH")])
    )
    argv = [
        sys.executable,
        "-P",
        "-m",
        "topspin.launch.calibration_node",
        "--model",
        config.model.path,
    ]
    argv += ["--dtype", "float32" if config.model.dtype == "float32" else "bfloat16"]
    argv += ["--kernels", config.compute.kernels_on(CPU), "--transport", candidate.transport]
    argv += ["--quantization", config.model.quantization]
    if candidate.layout == "split":
        expert = candidate.nodes[1].environment(os.environ)
        argv += ["--expert-cores", expert[CORES_VARIABLE]]
    try:
        done = subprocess.run(
            argv,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=CANDIDATE_TIMEOUT_S,
        )
        return float(json.loads(done.stdout)["step_ms"])
    except subprocess.TimeoutExpired as error:
        raise CalibrationError(f"no result in {CANDIDATE_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "no output").strip().splitlines()[-1:]
        raise CalibrationError(f"exit status {error.returncode}: {' '.join(last)}") from error
    except (ValueError, KeyError) as error:
        raise CalibrationError(f"unreadable result: {done.stdout!r}") from error


def _with(config: EngineConfig, chosen: Candidate) -> EngineConfig:
    transport = config.m2n.transport
    if transport == "auto":
        transport = chosen.transport
    compute = msgspec.structs.replace(config.compute, layout=chosen.layout)
    if chosen.nodes:
        first, threads = chosen.nodes[0], compute.num_threads
        if chosen.layout == "shared" and first.num_threads < len(os.sched_getaffinity(0)):
            threads = first.num_threads
        compute = msgspec.structs.replace(compute, spin_count=first.spin_count, num_threads=threads)
    return msgspec.structs.replace(
        config,
        compute=compute,
        m2n=msgspec.structs.replace(config.m2n, transport=transport),
    )


def _named(tried: Sequence[Candidate], name: str) -> Candidate | None:
    return next((candidate for candidate in tried if str(candidate) == name), None)


def _key(config: EngineConfig, cores: Sequence[int]) -> str:
    shapes = (Path(config.model.path) / "config.json").read_bytes()
    facts = (
        hashlib.sha256(shapes).hexdigest(),
        config.model.dtype,
        config.model.quantization,
        config.compute.kernels,
        config.compute.num_threads,
        config.compute.spin_count,
        config.topology.attention_nodes,
        config.topology.expert_nodes,
        config.m2n.transport,
        tuple(cores),
        platform.node(),
        platform.release(),
        __version__,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _read(cache: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(cache.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


def _write(cache: Path, choices: dict[str, str]) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        fresh = cache.with_name(f"{cache.name}.{os.getpid()}")
        fresh.write_text(json.dumps(choices, indent=1) + "\n")
        fresh.replace(cache)
    except OSError:
        # Without a cache the next start measures again.
        return
