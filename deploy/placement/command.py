"""`topspin plan`: reads a cluster, a model and a workload, writes the plan that serves them best.

Owns the command's flags and files. Called by app.cli.main.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Final, TextIO

from deploy.placement.cluster import Cluster, profile_of, read_cluster
from deploy.placement.reasons.explain import explain
from deploy.placement.report import PlanReport, draw, print_report
from deploy.placement.search.drafts import Decision, decide
from deploy.placement.search.layouts import Device, Host
from deploy.placement.search.search import ImpossibleError, Inputs, Result, search
from deploy.placement.sensitivity import read_sensitivity
from deploy.placement.shapes import ModelShape
from deploy.placement.workload import Drafts, read_workload
from deploy.placement.write import plan_of
from models.checkpoints.checkpoint_index import read_index
from models.checkpoints.fingerprint import digests_of, fingerprint_of
from models.description.config import load_model_config
from models.description.facts import facts_of
from models.sources.hub import resolve_model
from topspin.errors import ConfigError
from topspin.plan.file import print_plan
from topspin.plan.rules.model_facts import ModelFacts
from topspin.units import parse_size

QUIET_S: Final = 2.0
"""Searches that take longer say how they get on."""


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; see run()."""
    parser = argparse.ArgumentParser(prog="topspin plan", allow_abbrev=False)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--cluster", type=Path, required=True, metavar="FILE", help="hosts (YAML)")
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="checkpoint; its config.json is enough"
    )
    parser.add_argument(
        "--workload", type=Path, required=True, metavar="FILE", help="load and targets (YAML)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="plan to write; the report is written beside it as .json, further engines as -2, -3",
    )
    parser.add_argument(
        "--sensitivity", type=Path, metavar="FILE", help="what `topspin sensitivity` wrote"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the Pareto front (PNG)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--explain", action="store_true", help="print all settings, the front, and what lost"
    )
    shown.add_argument("--json", action="store_true", help="print the report as JSON, nothing else")


def run(asked: argparse.Namespace) -> int:
    """Plan; returns the exit status.

    Raises ConfigError for what cannot be read, ImpossibleError where no fleet meets the targets:
    then nothing is written.
    """
    inputs, facts = read_inputs(
        asked.cluster, asked.model, asked.workload, sensitivity=asked.sensitivity
    )
    with SearchProgress(sys.stderr, is_shown=sys.stderr.isatty()) as progress:
        result = search(inputs, progress)
        drafts = decide(inputs, result)
        report = explain(inputs, result, drafts, progress)
    if not result.members:
        _show(report, asked)
        raise ImpossibleError("nothing was written: these hosts cannot do what the workload asks")
    texts = plan_texts(inputs, result, model=asked.model, facts=facts, drafts=drafts)
    if asked.picture is not None:
        draw(report, asked.picture)
    report = report.with_files(write_plans(asked.output, texts))
    asked.output.with_suffix(".json").write_bytes(report.to_json())
    _show(report, asked)
    return 0


def _show(report: PlanReport, asked: argparse.Namespace) -> None:
    if asked.json:
        sys.stdout.write(report.to_json().decode())
    else:
        print_report(report, in_full=asked.explain)


class SearchProgress:
    """Says on a line of a terminal how many engines have been rated, in searches that take long."""

    def __init__(
        self, out: TextIO, *, is_shown: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out, self._clock, self._is_shown = out, clock, is_shown
        self._start_s = self._said_s = clock()
        self._num_rated = 0
        self._said = ""

    def __enter__(self) -> SearchProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._said:
            self._out.write("\r" + " " * len(self._said) + "\r")

    def __call__(self, _: int) -> None:
        """Count an engine."""
        self._num_rated += 1
        now_s = self._clock()
        is_late = now_s - self._start_s > QUIET_S and now_s - self._said_s >= 1
        if is_late and self._is_shown:
            self._said_s = now_s
            self._said = f"{self._num_rated} engines rated in {now_s - self._start_s:.0f} s"
            self._out.write(f"\r{self._said}")
            self._out.flush()


def read_inputs(
    cluster: Path, model: str, workload: Path, *, sensitivity: Path | None = None
) -> tuple[Inputs, ModelFacts]:
    """Return what the files say; raises ConfigError naming the file and the field."""
    directory = resolve_model(model)
    config = load_model_config(directory)
    has_weights = any(directory.glob("*.safetensors"))
    facts = facts_of(config, directory if has_weights else None)
    dtype = "float32" if config.dtype == "float32" else "bfloat16"
    shape = ModelShape.from_config(config, dtype=dtype)
    asked = read_workload(workload)
    longest = asked.prompt.high + asked.output.high
    if longest > config.context_length:
        raise ConfigError(
            f"--workload {workload}: prompts and outputs of p95 length have {longest:g} tokens, "
            f"the model has {config.context_length} positions"
        )
    measured = None
    if sensitivity is not None:
        fingerprint = fingerprint_of(digests_of(read_index(directory))) if has_weights else None
        measured = read_sensitivity(sensitivity, shape, fingerprint=fingerprint)
    found = read_cluster(cluster)
    hosts = hosts_of(found, cluster)
    inputs = Inputs(
        hosts,
        shape,
        config.context_length,
        asked,
        measured,
        precision=facts.precision,
        between_hosts=found.between_hosts,
        draft=None if asked.speculation is None else _draft_of(asked.speculation, shape, dtype),
    )
    return inputs, facts


def _draft_of(asked: Drafts, target: ModelShape, dtype: str) -> ModelShape:
    """Return the draft model, which computes in the target's dtype; raises ConfigError."""
    directory = Path(asked.draft_model)
    if not (directory / "config.json").is_file():  # nodes take a directory, no hub id
        raise ConfigError(f"speculation.draft_model {directory}: no directory with a config.json")
    config = load_model_config(directory)
    if config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculation.draft_model {asked.draft_model}: has a vocabulary of {config.vocab_size} "
            f"tokens, the model one of {target.vocab_size}"
        )
    return ModelShape.from_config(config, dtype=dtype)


def hosts_of(cluster: Cluster, path: Path) -> tuple[Host, ...]:
    """Return the hosts with their devices' profiles; raises ConfigError."""
    hosts = []
    for spec in cluster.hosts:
        devices = []
        for idx, group in enumerate(spec.devices):
            try:
                profile = profile_of(group, path.parent)
            except ConfigError as error:
                raise ConfigError(
                    f"--cluster {path}: {spec.name}: devices[{idx}]: {error}"
                ) from error
            price = profile.price_per_hour if group.price_per_hour is None else group.price_per_hour
            if profile.kind == "cuda" and (group.cores is not None or group.slow > 1):
                raise ConfigError(
                    f"--cluster {path}: {spec.name}: devices[{idx}]: cores and slow are for CPUs, "
                    f"{group.device} is a GPU; leave them out"
                )
            devices.append(
                Device(
                    group=idx,
                    profile=profile,
                    count=group.count,
                    memory_bytes=int(
                        profile.memory_bytes if group.memory is None else parse_size(group.memory)
                    ),
                    price_per_hour=price,
                    cores=(group.cores or profile.cores) if profile.kind == "cpu" else 0,
                    slow=group.slow,
                )
            )
        hosts.append(Host(spec, tuple(devices)))
    return tuple(hosts)


def plan_texts(
    inputs: Inputs,
    result: Result,
    *,
    model: str,
    facts: ModelFacts,
    drafts: Sequence[Decision] = (),
) -> list[str]:
    """Return the plan of each engine of the fleet as YAML."""
    rater = inputs.rater()
    return [
        print_plan(plan_of(rater, member.rating, path=model, facts=facts, drafts=decision))
        for member, decision in zip_longest(result.members, drafts)
    ]


def write_plans(path: Path, texts: Sequence[str]) -> list[str]:
    """Write the plans to `path` and, from the second on, beside it; returns the files' names."""
    paths = [path] + [
        path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(2, len(texts) + 1)
    ]
    for each, text in zip(paths, texts, strict=True):
        each.write_text(text)
    return [str(each) for each in paths]
