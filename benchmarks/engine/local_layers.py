"""The gain of keeping layers on the attention node where the link is slow.

Starts one engine after the other over an emulated link: all rows travel, they do not in every other
layer, they do not at all. All get the same prompts in turn, and the tokens must be equal. The
planner's cost model predicts each one's step from this machine's profile (`topspin profile`), to
which only the link's latency is added, and the processor's time of gateway, scheduler and client as
the run measured it. Run as `topspin bench local-layers --device DEVICE.json`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec

from app.cli.serve import plan_of
from benchmarks.experiment import (
    Experiment,
    rounds_in_turn,
    rows_of,
    settings_of,
)
from benchmarks.servers.topspin import Streams, TopspinServer, running
from deploy.placement.cluster import DeviceGroup, HostGroup, HostLink
from deploy.placement.devices import DeviceProfile, load_profile
from deploy.placement.formats import stored
from deploy.placement.search.layouts import Device, DeviceSlot, Host, layouts_of
from deploy.placement.search.steps import Clock, EngineSetup, EngineSteps
from deploy.placement.shapes import ModelShape
from deploy.placement.workload import Lengths, Workload
from models.description.config import load_model_config
from models.sources.hub import DEFAULT_MODEL, resolve_model
from topspin.plan.local_experts import LocalExperts
from topspin.plan.spec import EnginePlan
from topspin.plan.speculation import OFF

PROMPT_LEN: Final = 16


def predicted_s(
    profile: DeviceProfile,
    path: Path,
    *,
    latency_us: float,
    num_local: int,
    load: Streams,
    transport: Literal["shm", "tcp"] = "shm",
    num_nodes: tuple[int, int] = (1, 1),
    serving_s: float = 0.0,
) -> float:
    """Return the seconds of a decode step, as `topspin plan` counts an engine's.

    The device serves both roles in turns over its own link, `latency_us` longer; the first
    `num_local` MoE layers have no hop. Of several nodes of a role each takes as many times as long,
    since all compute on the same cores. So do gateway, scheduler and client, for `serving_s`,
    unless both roles wait for the longer link meanwhile.
    """
    model = ModelShape.from_config(load_model_config(path))
    own = next(each for each in profile.links if each.name == transport and each.shares_cores)
    if serving_s:
        engine_s, busy_s = (
            predicted_s(
                profile,
                path,
                latency_us=latency,
                num_local=num_local,
                load=load,
                transport=transport,
                num_nodes=num_nodes,
            )
            for latency in (latency_us, 0.0)
        )
        return max(engine_s, busy_s + serving_s / profile.cores)
    link = HostLink(
        transport=transport,
        alpha_us=own.alpha_s * 1e6 + latency_us,
        gbps=min(1e6, own.bytes_per_s * 8e-9),
    )
    spec = HostGroup(name="here", devices=(DeviceGroup(device=profile.name),), links=(link,))
    cpu = Device(0, profile, 1, int(profile.memory_bytes), 0.0, profile.cores, 1.0)
    layouts = layouts_of(Host(spec, (cpu,)), num_experts=model.num_experts).layouts
    layout = next(each for each in layouts if each.kind == "turns")
    attention, experts = (
        ((DeviceSlot(dataclasses.replace(cpu, slow=float(count)), cpu.cores), count),)
        for count in num_nodes
    )
    engine = EngineSetup(
        dataclasses.replace(layout, attention=attention, experts=experts),
        stored(model),
        held=(-(-model.num_experts // num_nodes[1]),),
        weights=(1.0 / num_nodes[0],),
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
        speculation=OFF,
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


def measured(server: TopspinServer, turn: int, load: Streams) -> tuple[float, float]:
    """Return tokens per second, and the seconds of gateway, scheduler and client for each step."""
    before_s = server.serving_cpu_s()
    rate = round(server.decode_rate(load, turn), 1)
    serving_s = server.serving_cpu_s() - before_s
    return rate, serving_s / load.output_len


COLUMNS: Final = {
    "layers without a hop": "{layers_without_hop}",
    "tokens/s": "{tokens_per_s}",
    "predicted": "{predicted_tokens_per_s}",
    "speed-up": "{speed_up:.2f}x",
    "speed-up predicted": "{predicted_speed_up:.2f}x",
    "error": "{error:+.1%}",
}
EXPERIMENT = Experiment("local_layers", __doc__, rows_of(COLUMNS))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in turns, compare with the prediction, and write the result."""
    parser = EXPERIMENT.parser(model=DEFAULT_MODEL, rounds=5)
    parser.add_argument(
        "--device", type=Path, required=True, metavar="FILE", help="this machine's profile"
    )
    parser.add_argument("--latency-us", type=float, default=500.0)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=48)
    args = parser.parse_args(argv)
    path = resolve_model(args.model)
    vocab_size = load_model_config(path).vocab_size
    profile = load_profile(args.device)
    load = Streams(args.requests, PROMPT_LEN, args.output_len, vocab_size)
    planned = plans(path, latency_us=args.latency_us, requests=args.requests)
    with running({name: plan for name, (_, plan) in planned.items()}) as servers:
        served = rounds_in_turn(servers, partial(measured, load=load), rounds=args.rounds)
    rounds = [{name: rate for name, (rate, _) in each.items()} for each in served]
    predicted = {
        name: predicted_s(
            profile,
            path,
            latency_us=args.latency_us,
            num_local=count,
            load=load,
            serving_s=statistics.median(each[name][1] for each in served),
        )
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
                "predicted_tokens_per_s": round(args.requests / predicted[name], 1),
                "speed_up": round(gain, 3),
                "predicted_speed_up": round(expected, 3),
                "error": round(expected / gain - 1, 3),
            }
        )
    settings = settings_of(args, model=Path(args.model).name, device=profile.name)
    return EXPERIMENT.finish(args, {"settings": settings, "rows": rows, "rounds": rounds})


if __name__ == "__main__":
    raise SystemExit(main())
