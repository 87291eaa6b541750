"""What is gained by keeping layers on the attention node where the link is slow?

Starts one engine after the other over an emulated link: all rows travel, they do not in every other
layer, they do not at all. All get the same prompts in turn, and the tokens must be equal. The first
engine's own timings predict the others': without a hop a layer's wait for experts becomes the time
that the expert node took to compute, and nothing else of the step changes. No step is recorded:
with an emulated link none can be, and the comparison is of hops. Run as
`topspin bench local-layers`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks import report
from benchmarks.disaggregation import run_once
from benchmarks.vs_transformers import TopspinServer
from models.config import load_model_config
from models.hub import resolve_model
from topspin.cli.serve import resolve_for
from topspin.config import (
    CacheSection,
    ComputeSection,
    EngineConfig,
    M2NSection,
    ModelSection,
    SchedulerSection,
)
from topspin.local_experts import LocalExperts
from topspin.plan import EnginePlan
from topspin.plan_file import print_plan

_PHASES = ("attention", "wait", "expert", "sample", "prepare")


class _Side:
    """A running engine, and its seconds per decode step."""

    def __init__(self, plan: EnginePlan, directory: Path, name: str) -> None:
        path = directory / f"{name}.yaml"
        path.write_text(print_plan(plan))
        self.server = TopspinServer(f"--plan={path}", [])
        self.rates: list[float] = []

    def totals(self) -> dict[str, float]:
        """Return the sums of all steps' phases, and the number of steps."""
        text = httpx.get(f"{self.server.url}/metrics").text
        names = {each: f"topspin_step_{each}_seconds_sum" for each in _PHASES}
        names["steps"] = "topspin_engine_steps_total"
        found = {}
        for key, name in names.items():
            match = re.search(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
            assert match is not None, name
            found[key] = float(match[1])
        return found


def predicted_s(per_step: dict[str, float], share: float) -> float:
    """Return the seconds of a step in which a `share` of the layers has no hop.

    `per_step` are the phases of a step in which all layers have one.
    """
    whole_s = sum(per_step[each] for each in ("attention", "wait", "sample", "prepare"))
    return whole_s - share * (per_step["wait"] - per_step["expert"])


def plans(path: Path, *, latency_us: float, requests: int) -> dict[str, tuple[float, EnginePlan]]:
    """Return the engines, with the share of layers that have no hop."""
    model = load_model_config(path)
    remote = resolve_for(
        EngineConfig(
            model=ModelSection(path=str(path), max_model_len=1024),
            m2n=M2NSection(transport="shm", link_latency_us=latency_us),
            scheduler=SchedulerSection(max_num_seqs=requests, micro_batches=1),
            cache=CacheSection(kv_cache_bytes=256 * 2**20),
            compute=ComputeSection(layout="shared", recordings=False),
        ),
        model,
        path,
    )
    half, whole = (LocalExperts(layers=model.moe_layers[::n], when="always") for n in (2, 1))
    replace = msgspec.structs.replace
    return {
        "remote": (0.0, remote),
        "half": (len(half.layers) / len(whole.layers), replace(remote, local_experts=half)),
        "local": (1.0, replace(remote, local_experts=whole, nodes=tuple(remote.attention))),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in turns, compare with the prediction, and write the result."""
    parser = argparse.ArgumentParser(prog="topspin bench local-layers", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-moe")
    parser.add_argument("--latency-us", type=float, default=500.0)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args(argv)
    path = resolve_model(args.model)
    vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    planned = plans(path, latency_us=args.latency_us, requests=args.requests)
    sides: dict[str, _Side] = {}
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for name, (_, plan) in planned.items():
                sides[name] = _Side(plan, Path(directory), name)
            before: dict[str, float] = {}
            for turn in range(-1, args.rounds):
                if turn == 0:
                    before = sides["remote"].totals()
                prompts = [
                    [rng.randrange(vocab_size) for _ in range(16)] for _ in range(args.requests)
                ]
                rates = {}
                for name in sorted(sides, reverse=turn % 2 == 0):
                    rates[name], _ = run_once(sides[name].server, prompts, args.output_len)
                if turn >= 0:
                    rounds.append({name: round(rate, 1) for name, rate in rates.items()})
                    print(json.dumps(rounds[-1]), flush=True)
            after = sides["remote"].totals()
        finally:
            for side in sides.values():
                side.server.close()
    steps = after["steps"] - before["steps"]
    per_step = {each: (after[each] - before[each]) / steps for each in _PHASES}
    rows = []
    for name, (share, _) in planned.items():
        gain = statistics.median(each[name] / each["remote"] for each in rounds)
        expected = predicted_s(per_step, 0.0) / predicted_s(per_step, share)
        rows.append(
            {
                "layers_without_hop": name,
                "tokens_per_s": statistics.median(each[name] for each in rounds),
                "speed_up": round(gain, 3),
                "predicted_speed_up": round(expected, 3),
                "error": round(expected / gain - 1, 3),
            }
        )
        print(json.dumps(rows[-1]))
    result = {
        "settings": {key: value for key, value in vars(args).items() if key != "no_write"},
        "remote_step_ms": {each: round(1e3 * value, 3) for each, value in per_step.items()},
        "rows": rows,
        "rounds": rounds,
    }
    if not args.no_write:
        print(f"written: {report.write('local_layers', result).name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
