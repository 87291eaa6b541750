"""What is gained by keeping layers on the attention node where the link is slow?

Starts one engine after the other over an emulated link: all rows travel, they do not in every other
layer, they do not at all. All get the same prompts in turn, and the tokens must be equal. The
planner's cost model predicts each one's step from this machine's profile (`topspin profile`), to
which only the link's latency is added. Run as `topspin bench local-layers --device DEVICE.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from app.cli.serve import plan_of
from benchmarks import report
from benchmarks.disaggregation import run_once
from benchmarks.vs_transformers import TopspinServer
from deploy.placement.cluster import DeviceGroup, HostGroup, HostLink
from deploy.placement.devices import DeviceProfile, load_profile
from deploy.placement.formats import stored
from deploy.placement.search.layouts import Device, Host, layouts_of
from deploy.placement.search.steps import Clock, Engine, EngineSteps
from deploy.placement.shapes import ModelShape
from deploy.placement.workload import Lengths, Workload
from models.description.config import load_model_config
from models.sources.hub import resolve_model
from topspin.plan.file import print_plan
from topspin.plan.local_experts import LocalExperts
from topspin.plan.spec import EnginePlan

PROMPT_LEN: Final = 16


class Load(NamedTuple):
    """What all engines are asked: so many requests at once, of these lengths in tokens."""

    requests: int
    prompt_len: int
    output_len: int


class _Side:
    """A running engine."""

    def __init__(self, plan: EnginePlan, directory: Path, name: str) -> None:
        path = directory / f"{name}.yaml"
        path.write_text(print_plan(plan))
        self.server = TopspinServer(f"--plan={path}", [])


def predicted_s(
    profile: DeviceProfile, path: Path, *, latency_us: float, num_local: int, load: Load
) -> float:
    """Return the seconds of a decode step, as `topspin plan` counts them.

    The device serves both roles in turns over its own shm link, `latency_us` longer; the first
    `num_local` MoE layers have no hop.
    """
    model = ModelShape.from_config(load_model_config(path))
    own = next(each for each in profile.links if each.name == "shm" and each.shares_cores)
    link = HostLink(
        transport="shm",
        alpha_us=own.alpha_s * 1e6 + latency_us,
        gbps=min(1e6, own.bytes_per_s * 8e-9),
    )
    spec = HostGroup(name="here", devices=(DeviceGroup(device=profile.name),), links=(link,))
    cpu = Device(0, profile, 1, int(profile.memory_bytes), 0.0, profile.cores, 1.0)
    layouts = layouts_of(Host(spec, (cpu,)), num_experts=model.num_experts).layouts
    engine = Engine(
        next(each for each in layouts if each.kind == "turns"),
        stored(model),
        held=(model.num_experts,),
        weights=(1.0,),
        micro_batches=1,
        batched_tokens=512,
        num_local=num_local,
    )
    workload = Workload(
        prompt=Lengths(mean=load.prompt_len),
        output=Lengths(mean=load.output_len),
        users=load.requests,
    )
    return EngineSteps(engine, Clock(model, workload)).step_s(load.requests, None)


def plans(path: Path, *, latency_us: float, requests: int) -> dict[str, tuple[int, EnginePlan]]:
    """Return the engines, with the number of layers that have no hop."""
    model = load_model_config(path)
    remote = plan_of(
        path,
        max_model_len=1024,
        transport="shm",
        latency_us=latency_us,
        max_num_seqs=requests,
        micro_batches=1,
        kv_cache_bytes=256 * 2**20,
        layout="shared",
    )
    half, whole = (LocalExperts(layers=model.moe_layers[::n], when="always") for n in (2, 1))
    replace = msgspec.structs.replace
    return {
        "remote": (0, remote),
        "half": (len(half.layers), replace(remote, local_experts=half)),
        "local": (
            len(whole.layers),
            replace(remote, local_experts=whole, nodes=tuple(remote.attention)),
        ),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in turns, compare with the prediction, and write the result."""
    parser = argparse.ArgumentParser(prog="topspin bench local-layers", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-moe")
    parser.add_argument(
        "--device", type=Path, required=True, metavar="FILE", help="this machine's profile"
    )
    parser.add_argument("--latency-us", type=float, default=500.0)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args(argv)
    path = resolve_model(args.model)
    vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
    profile = load_profile(args.device)
    load = Load(args.requests, PROMPT_LEN, args.output_len)
    rng = random.Random(0)
    planned = plans(path, latency_us=args.latency_us, requests=args.requests)
    sides: dict[str, _Side] = {}
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for name, (_, plan) in planned.items():
                sides[name] = _Side(plan, Path(directory), name)
            for turn in range(-1, args.rounds):
                prompts = [
                    [rng.randrange(vocab_size) for _ in range(PROMPT_LEN)]
                    for _ in range(args.requests)
                ]
                rates = {}
                for name in sorted(sides, reverse=turn % 2 == 0):
                    rates[name], _ = run_once(sides[name].server, prompts, args.output_len)
                if turn >= 0:
                    rounds.append({name: round(rate, 1) for name, rate in rates.items()})
                    print(json.dumps(rounds[-1]), flush=True)
        finally:
            for side in sides.values():
                side.server.close()
    predicted = {
        name: predicted_s(profile, path, latency_us=args.latency_us, num_local=count, load=load)
        for name, (count, _) in planned.items()
    }
    rows = []
    for name, (count, _) in planned.items():
        gain = statistics.median(each[name] / each["remote"] for each in rounds)
        expected = predicted["remote"] / predicted[name]
        rows.append(
            {
                "engine": name,
                "layers_without_hop": count,
                "tokens_per_s": statistics.median(each[name] for each in rounds),
                "predicted_tokens_per_s": round(load.requests / predicted[name], 1),
                "speed_up": round(gain, 3),
                "predicted_speed_up": round(expected, 3),
                "error": round(expected / gain - 1, 3),
            }
        )
        print(json.dumps(rows[-1]))
    settings = {**vars(args), "model": Path(args.model).name, "device": profile.name}
    result = {
        "settings": {key: value for key, value in settings.items() if key != "no_write"},
        "rows": rows,
        "rounds": rounds,
    }
    if not args.no_write:
        print(f"written: {report.write('local_layers', result).name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
