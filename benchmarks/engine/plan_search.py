"""Seconds that the planner's search takes, of the processor and by the clock.

Nothing runs but the search: Qwen3-30B-A3B's shape on devices of data sheets, a cluster after the
other. Run as `topspin bench plan-search`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
WITHIN: Final = (
    HostLink(transport="cuda_ipc", alpha_us=8, gbps=2000),
    HostLink(transport="shm", alpha_us=25, gbps=100),
)
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
                links=WITHIN,
                price_per_hour=1.0,
            )
            for count, devices in self.hosts
        )
        lengths = Lengths(mean=200, p95=500), Lengths(mean=100, p95=250)
        workload = Workload(
            prompt=lengths[0],
            output=lengths[1],
            arrival_rate=self.arrival_rate,
            targets=Targets(ttft_s=2.0, tpot_s=0.05),
            objective=self.objective,
        )
        between = CARD if self.are_joined else None
        found = hosts_of(Cluster(hosts=hosts), Path())
        return Inputs(found, MODEL, CONTEXT, workload, between_hosts=between)


GPUS: Final = ("a10", "a100", "h100", "h20", "h200", "l4", "l40s")
MANY: Final = (*((178, {gpu: 8}) for gpu in GPUS), (32, {"epyc-9354": 1}))
CASES: Final = {
    "10,000 devices of 8 types": Case(MANY, 20_000, "min_price", 10),
    "the same, engines over hosts too": Case(MANY, 20_000, "min_price", 10, are_joined=True),
    "4 CPUs and 8 GPUs on a host": Case(
        ((1, {"epyc-9354": 4, "h200": 8}),), 10, "max_throughput", 10
    ),
    "64 GPUs on 8 hosts": Case(
        ((4, {"h20": 8}), (4, {"l40s": 8})), 20, "max_throughput", 5, are_joined=True
    ),
}


def timed() -> Iterator[dict[str, Any]]:
    """Yield each search's seconds and what it found."""
    for name, case in CASES.items():
        inputs = case.inputs()
        begun_s, worked_s = time.perf_counter(), time.process_time()
        found = search(inputs)
        yield {
            "what": name,
            "engines": len(found.ratings),
            "cpu_s": time.process_time() - worked_s,
            "wall_s": time.perf_counter() - begun_s,
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
    return EXPERIMENT.finish(args, {"rows": list(timed())})


if __name__ == "__main__":
    raise SystemExit(main())
