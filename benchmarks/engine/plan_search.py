"""Seconds that the planner's search takes, of the processor and by the clock.

Nothing runs but the search: Qwen3-30B-A3B's shape on devices of data sheets, a cluster after the
other. Run as `topspin bench plan-search`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.engine.published import shape
from benchmarks.experiment import Experiment, rows_of, say
from deploy.placement.cluster import Cluster, DeviceGroup, HostGroup, HostLink
from deploy.placement.command import hosts_of
from deploy.placement.search.search import Inputs, search
from deploy.placement.workload import Lengths, Objective, Targets, Workload

MODEL: Final = shape(2048, 48, (32, 4), (128, 8, 768), 151936)
CONTEXT: Final = 8192
GPU_LINK: Final = HostLink(transport="cuda_ipc", alpha_us=8, gbps=2000)
SHARED_MEMORY: Final = HostLink(transport="shm", alpha_us=25, gbps=100)
CARD: Final = HostLink(transport="nixl", alpha_us=12, gbps=400)


class Case(NamedTuple):
    """Hosts of each kind, as (how many, devices of each); requests per second; the bound."""

    hosts: tuple[tuple[int, dict[str, int]], ...]
    arrival_rate: float
    objective: Objective
    bound_s: float
    are_joined: bool = False

    def inputs(self) -> Inputs:
        """Return what the search is about."""
        hosts = tuple(
            HostGroup(
                name=" ".join(devices),
                count=count,
                devices=tuple(DeviceGroup(device=each, count=n) for each, n in devices.items()),
                links=(GPU_LINK, SHARED_MEMORY),
                price_per_hour=1.0,
            )
            for count, devices in self.hosts
        )
        load = Workload(
            prompt=Lengths(mean=200, p95=500),
            output=Lengths(mean=100, p95=250),
            arrival_rate=self.arrival_rate,
            targets=Targets(ttft_s=2.0, tpot_s=0.05),
            objective=self.objective,
        )
        card = CARD if self.are_joined else None
        read = hosts_of(Cluster(hosts=hosts), Path())
        return Inputs(read, MODEL, CONTEXT, load, between_hosts=card)


GPUS: Final = ("a10", "a100", "h100", "h20", "h200", "l4", "l40s")
MANY: Final = (*((178, {gpu: 8}) for gpu in GPUS), (32, {"epyc-9354": 1}))
MIXED: Final = ((1, {"epyc-9354": 4, "h200": 8}),)
PAIR: Final = ((4, {"h20": 8}), (4, {"l40s": 8}))
CASES: Final = {
    "10,000 devices of 8 types": Case(MANY, 20_000, "min_price", 10),
    "the same, engines over hosts too": Case(MANY, 20_000, "min_price", 10, are_joined=True),
    "4 CPUs and 8 GPUs on a host": Case(MIXED, 10, "max_throughput", 10),
    "64 GPUs on 8 hosts": Case(PAIR, 20, "max_throughput", 5, are_joined=True),
}


def timed(cases: Mapping[str, Case]) -> Iterator[dict[str, Any]]:
    """Yield each search's seconds and what it found."""
    for name, case in cases.items():
        inputs = case.inputs()
        begun_s, worked_s = time.perf_counter(), time.process_time()
        found = search(inputs)
        yield {
            "what": name,
            "cpu_s": time.process_time() - worked_s,
            "wall_s": time.perf_counter() - begun_s,
            "engines": len(found.ratings),
            "bound_s": case.bound_s,
            "requests_per_s": found.load,
        }
        say(name)


COLUMNS: Final = {
    "hosts": "{what}",
    "engines rated": "{engines}",
    "CPU time, s": "{cpu_s}",
    "by the clock, s": "{wall_s}",
    "promised, s": "{bound_s:g}",
}
EXPERIMENT = Experiment("plan_search", __doc__, rows_of(COLUMNS))


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print the table, and write the result."""
    args = EXPERIMENT.parser().parse_args(argv)
    return EXPERIMENT.finish(args, {"rows": list(timed(CASES))})


if __name__ == "__main__":
    raise SystemExit(main())
