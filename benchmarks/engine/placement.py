"""The gain of giving each expert node a share of the experts by its speed.

Starts one engine per placement of the routed experts over two expert nodes, of which the second is
an emulated device that takes `--slow` times as long: `uniform` gives both as many, `planned` as
many as `topspin plan` gives the nodes of this layout, by the machine's profile (`topspin profile`);
whether another layout were better is not asked. Both get the same prompts, in turns within each
round, and the decode rate is compared: tokens per second while all streams decode. The expert nodes
have a thread each and sleep where the emulated device would go on computing, so on two cores they
do not delay one another; attention, which waits meanwhile, has both. Run as
`topspin bench placement --device DEVICE.json`.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from app.cli.serve import plan_of
from benchmarks.experiment import (
    Experiment,
    Result,
    TextTable,
    check_positive,
    number,
    ratio_text,
    rounds_in_turn,
    say,
    settings_of,
    spread,
)
from benchmarks.servers.topspin import Metrics, Streams, TopspinServer, running
from deploy.placement.cluster import DeviceGroup, HostGroup, HostLink
from deploy.placement.devices import DeviceProfile, load_profile
from deploy.placement.formats import stored
from deploy.placement.search.layouts import Device, Host, layouts_of
from deploy.placement.search.rating import Rater
from deploy.placement.shapes import ModelShape
from deploy.placement.workload import Lengths, Workload
from models.description.config import ModelConfig, load_model_config
from models.sources.hub import DEFAULT_MODEL, resolve_model
from topspin.expert_table import shares_by_speed
from topspin.plan.rules.checks import check_plan
from topspin.plan.settings import BalancePolicy
from topspin.plan.spec import EnginePlan
from topspin.plan.speculation import OFF

UNIFORM: Final = "uniform"
PLANNED: Final = "planned"
_PHASE: Final = re.compile(r"topspin_step_(\w+)_seconds_sum")


def plans(path: Path, args: argparse.Namespace) -> dict[str, EnginePlan]:
    """Return the plan of each placement; they differ in the nodes' numbers of experts only."""
    model = load_model_config(path)
    if model.moe is None:
        raise SystemExit(f"{path} has no routed experts")
    base = plan_of(
        path,
        expert_nodes=2,
        transport="shm",
        num_threads=1,
        layout="shared",
        speculation=OFF,
        # Copies of the prompts would not be computed, and moved experts not be those of the plan.
        prefix_caching=False,
        micro_batches=args.micro_batches,
        balance=BalancePolicy(interval_s=0.0),
    )
    attention, first, second = base.nodes
    found = {}
    for name, shares in (
        (UNIFORM, shares_by_speed(model.moe.num_experts, (1.0, 1.0))),
        (PLANNED, planned_shares(load_profile(args.device), model, args)),
    ):
        nodes = (
            replace(attention, num_threads=args.attention_threads),
            replace(first, experts=shares[0]),
            replace(second, experts=shares[1], slow=args.slow),
        )
        found[name] = replace(base, nodes=nodes)
        check_plan(found[name])
    return found


def planned_shares(
    profile: DeviceProfile, model: ModelConfig, args: argparse.Namespace
) -> tuple[int, ...]:
    """Return the experts of both nodes as the planner divides them.

    The host has the attention's cores and, apart from them, one core for each expert node, of which
    the second is slow.
    """
    assert model.moe is not None
    slots = ((args.attention_threads, 1.0), (1, 1.0), (1, args.slow))
    memory = int(profile.memory_bytes)
    devices = tuple(
        Device(group, profile, 1, memory, 0.0, cores, slow)
        for group, (cores, slow) in enumerate(slots)
    )
    link = HostLink(transport="shm", alpha_us=1.0, gbps=100.0)
    groups = tuple(DeviceGroup(device=profile.name) for _ in devices)
    host = Host(HostGroup(name="here", devices=groups, links=(link,)), devices)
    layout = next(
        each
        for each in layouts_of(host, num_experts=model.moe.num_experts).layouts
        if [slot.device.group for slot, _ in each.attention] == [0]
        and [slot.device.group for slot, _ in each.experts] == [1, 2]
    )
    shape = ModelShape.from_config(model)
    workload = Workload(
        prompt=Lengths(mean=args.prompt_len),
        output=Lengths(mean=args.output_len),
        users=max(int(batch) for batch in args.batches.split(",")),
    )
    rater = Rater(shape, workload, context_length=model.context_length)
    shares = rater.nodes.shares(layout, stored(shape), args.prompt_len)
    if shares is None:
        raise SystemExit("the experts do not fit")
    return shares


def measure(
    servers: Mapping[str, TopspinServer], streams: Streams, *, rounds: int
) -> dict[str, Any]:
    """Measure rounds of streams; the first, which warms up, is not counted."""
    before: dict[str, Metrics] = {}

    def rate(name: str, turn: int) -> float:
        if turn == 0:
            before[name] = servers[name].metrics()
        return servers[name].decode_rate(streams, turn)

    say(f"{streams.requests} streams")
    found = [
        {**rates, "ratio": rates[PLANNED] / rates[UNIFORM]}
        for rates in rounds_in_turn({name: name for name in servers}, rate, rounds=rounds)
    ]
    ratio = spread([row["ratio"] for row in found])._asdict()
    del ratio["rounds"]
    return {
        "rounds": [{name: round(value, 3) for name, value in row.items()} for row in found],
        "median_decode_tokens_per_s": {
            name: round(statistics.median(row[name] for row in found), 1) for name in servers
        },
        "ratio": ratio,
        "mean_step_ms": {
            name: mean_step_ms(before[name], server.metrics()) for name, server in servers.items()
        },
    }


def mean_step_ms(before: Metrics, after: Metrics) -> dict[str, float]:
    """Return the mean time of a step's phases between two readings, of those that happened."""
    found = {}
    for sums in after:
        if phase := _PHASE.fullmatch(sums):
            counts = sums.removesuffix("sum") + "count"
            if steps := after[counts] - before[counts]:
                found[phase[1]] = round((after[sums] - before[sums]) / steps * 1e3, 3)
    return found


def layout(result: Result) -> Iterator[TextTable]:
    """Yield the decode rates of uniform and planned shares, by the number of streams."""
    rows = []
    for batch, found in result["batches"].items():
        rates, ratios = found["median_decode_tokens_per_s"], [r["ratio"] for r in found["rounds"]]
        rows.append([batch, number(rates[UNIFORM]), number(rates[PLANNED]), ratio_text(ratios)])
    held = {name: " + ".join(map(str, each[1:])) for name, each in result["experts"].items()}
    heads = [f"{name} ({held[name]} experts), tokens/s" for name in (UNIFORM, PLANNED)]
    yield TextTable(["streams", *heads, "ratio"], rows)


EXPERIMENT = Experiment("placement", __doc__, layout)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare in turn, print the table, and write the result."""
    parser = EXPERIMENT.parser(model=DEFAULT_MODEL, rounds=5)
    parser.add_argument(
        "--device", type=Path, required=True, metavar="FILE", help="this machine's profile"
    )
    parser.add_argument("--slow", type=float, default=2.0, help="of the second node (%(default)s)")
    parser.add_argument("--batches", default="16,64", help="streams at once (%(default)s)")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens (%(default)s)")
    parser.add_argument("--output-len", type=int, default=96, help="tokens (%(default)s)")
    parser.add_argument("--attention-threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--micro-batches", type=int, default=1, help="(%(default)s)")
    args = parser.parse_args(argv)
    check_positive(args, ("rounds", "prompt_len", "output_len", "attention_threads"))
    path = resolve_model(args.model)
    made = plans(path, args)
    vocab_size = load_model_config(path).vocab_size
    with running(made) as servers:
        found = {
            batch: measure(
                servers,
                Streams(int(batch), args.prompt_len, args.output_len, vocab_size),
                rounds=args.rounds,
            )
            for batch in args.batches.split(",")
        }
    model, device = Path(args.model).name, load_profile(args.device).name
    result = {
        "settings": settings_of(args, model=model, device=device),
        "experts": {name: [node.experts for node in plan.experts] for name, plan in made.items()},
        "batches": found,
    }
    return EXPERIMENT.finish(args, result)


if __name__ == "__main__":
    raise SystemExit(main())
