"""The flags of `topspin bench compare`, and the plan made from them.

Owns the checks that need no server; sends nothing. Called by benchmarks.compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.byte_floor import BITS, step_weight_bytes
from benchmarks.load import arguments, datasets, pictures, report
from benchmarks.load.contracts import BenchRequest, Load, Target
from benchmarks.load.sweep import numbers
from models.description.config import load_model_config
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError
from topspin.plan.precision import UNQUANTISED

_LEAST_REQUESTS = 8
_REQUESTS_PER_PLACE = 4


@dataclass(frozen=True)
class Named:
    """A target of the command line; `model` None: the first one that it lists."""

    name: str
    url: str
    model: str | None
    command: str | None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="topspin bench compare",
        description="Measures several servers on the same prompts, in turn.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--target",
        action="append",
        required=True,
        metavar="NAME=URL[=MODEL]",
        help="a server, at least two; ratios are to the first",
    )
    parser.add_argument(
        "--start",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="start this target before its turn and stop it after",
    )
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="S")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--concurrencies", default="1,16", metavar="N,N,...", help="requests at once (%(default)s)"
    )
    parser.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help=f"requests a run ({_REQUESTS_PER_PLACE} a place, {_LEAST_REQUESTS} at least)",
    )
    parser.add_argument(
        "--num-warmups", type=int, metavar="N", help="before each run (as many as at once)"
    )
    parser.add_argument(
        "--check-tokens",
        type=int,
        default=32,
        metavar="N",
        help="length of the answers that are compared; 0 compares none (%(default)s)",
    )
    parser.add_argument(
        "--require-equal", action="store_true", help="fail if the greedy answers differ"
    )
    parser.add_argument("--request-timeout", type=float, default=600.0, metavar="S")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (%(default)s)")
    parser.add_argument(
        "--floor-model",
        type=Path,
        metavar="DIR",
        help="compare the time per token of one request with the least for this checkpoint",
    )
    parser.add_argument(
        "--floor-quantization",
        choices=(UNQUANTISED, *BITS),
        default=UNQUANTISED,
        help="the format of its weights (%(default)s)",
    )
    arguments.add_request_arguments(parser.add_argument_group("requests"))
    datasets.add_arguments(parser)
    parser.add_argument(
        "--result-dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="of compare.json, compare.png and the logs of started servers",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="the last round side by side, .html or .png"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress within a run")
    return parser


@dataclass(frozen=True)
class Plan:
    """The checked request of the command line; `floor_bytes` only with --floor-model."""

    parsed: argparse.Namespace
    targets: tuple[Named, ...]
    concurrencies: tuple[int, ...]
    rounds: int
    dataset: datasets.DatasetSettings
    floor_bytes: int | None

    @classmethod
    def of(cls, flags: Sequence[str] | None) -> Plan:
        """Read `flags` (None: the process's); make all checks that need no server."""
        parsed = _parser().parse_args(flags)
        if parsed.rounds < 1:
            raise ConfigError(f"--rounds is {parsed.rounds}; it must be 1 or more")
        if parsed.check_tokens < 0 or (parsed.num_warmups or 0) < 0:
            raise ConfigError("--check-tokens and --num-warmups must be 0 or more")
        if parsed.require_equal and (parsed.check_tokens == 0 or parsed.temperature != 0):
            raise ConfigError("--require-equal needs --check-tokens above 0 and --temperature 0")
        if not 0 < parsed.request_timeout < math.inf or not parsed.start_timeout > 0:
            raise ConfigError("--request-timeout and --start-timeout must be above 0")
        if parsed.report is not None:
            report.check_path(parsed.report)
            pictures.check_can_draw()
        return cls(
            parsed=parsed,
            targets=named_targets(parsed),
            concurrencies=tuple(
                int(n) for n in numbers("--concurrencies", parsed.concurrencies, whole=True)
            ),
            rounds=parsed.rounds,
            dataset=datasets.DatasetSettings.of(parsed, chat=parsed.backend == "openai-chat"),
            floor_bytes=_floor_bytes(parsed),
        )

    def load(self, at: int) -> Load:
        """Return the load of one run: a closed loop of `at` requests."""
        return Load(max_concurrency=at, request_timeout_s=self.parsed.request_timeout)

    def requests(self, which: Sequence[int], tokenizer: Tokenizer | None) -> list[BenchRequest]:
        """Return the prompts of run `which` (round, concurrency, kind), equal for all targets."""
        rng = np.random.default_rng([self.parsed.seed, *which])
        settings = self.dataset
        if settings.num_prompts is None:
            count = max(_LEAST_REQUESTS, _REQUESTS_PER_PLACE * which[1])
            settings = dataclasses.replace(settings, num_prompts=count)
        return datasets.load(settings, tokenizer, rng)

    def target(self, named: Named, model: str) -> Target:
        """Return the load tester's Target for `named`, serving `model`."""
        asked = argparse.Namespace(**{**vars(self.parsed), "model": model})
        return arguments.target_of(asked, named.url, dataset_name=self.dataset.name)


def _floor_bytes(parsed: argparse.Namespace) -> int | None:
    if parsed.floor_model is None:
        return None
    return step_weight_bytes(load_model_config(parsed.floor_model), parsed.floor_quantization)


def named_targets(parsed: argparse.Namespace) -> tuple[Named, ...]:
    """Return the targets; raises ConfigError for a duplicate name or a --start without a target."""
    commands = arguments.key_values("--start", parsed.start)
    if len(commands) < len(parsed.start):
        raise ConfigError("--start names a target twice")
    found: dict[str, Named] = {}
    for word in parsed.target:
        name, _, rest = word.partition("=")
        url, _, model = rest.partition("=")
        if not name or not url:
            raise ConfigError(f"--target {word}: expected NAME=URL or NAME=URL=MODEL")
        if not re.fullmatch(r"[\w.+-]+", name):
            raise ConfigError(f"--target {word}: a name has letters, digits, '.', '_', '+', '-'")
        if name in found:
            raise ConfigError(f"--target names {name} twice")
        where = argparse.Namespace(base_url=url, host=None, port=None)
        base_url = arguments.base_url_of(where)
        found[name] = Named(name, base_url, model or parsed.model, commands.get(name))
    if len(found) < 2:
        raise ConfigError("a comparison needs two targets: give --target at least twice")
    for name in commands:
        if name not in found:
            raise ConfigError(f"--start {name}: no --target has this name")
    return tuple(found.values())
