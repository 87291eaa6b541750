"""Which cores and threads each node of one host gets, and how it waits: the layout.

Pure: knows the numbers of nodes and cores, starts nothing and measures nothing.
topspin.launch.calibrate chooses between layouts, topspin.launch.engine carries one out.

"shared": every node uses all cores and they take turns, so waits block at once. "split":
every node has cores of its own, so waits spin (a wake-up between cores costs 20 us).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from topspin.errors import ConfigError

Layout = Literal["shared", "split"]
CORES_VARIABLE = "TOPSPIN_CORES"

# Short spins between the parallel regions of one layer pay; libgomp's default (milliseconds)
# takes the cores from the node whose turn it is.
SPIN_COUNT = 3000


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCores:
    """What one node gets. `cores` None: all that the process may use.

    `spin_count`: how often an idle OpenMP thread looks for work before it sleeps.
    """

    num_threads: int
    cores: tuple[int, ...] | None
    spin_count: int = SPIN_COUNT

    def environment(self, user: Mapping[str, str]) -> dict[str, str]:
        """Return the settings by which a node process learns it; `user`'s own OpenMP ones stay.

        Nodes with fewer threads than cores are not bound: all would get the same first cores.
        """
        settings = {"GOMP_SPINCOUNT": str(self.spin_count)}
        settings["OMP_NUM_THREADS"] = str(self.num_threads)
        if self.cores is not None:
            mine = {CORES_VARIABLE: ",".join(map(str, self.cores))}
        else:
            mine = {}
            if self.num_threads == len(os.sched_getaffinity(0)):
                settings |= {"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"}
        return mine | {name: value for name, value in settings.items() if name not in user}


def assign_cores(
    layout: Layout, *, num_nodes: int, cores: Sequence[int], num_threads: int | None
) -> list[NodeCores]:
    """Return what each of `num_nodes` nodes gets of `cores`.

    Raises ConfigError if a split leaves a node without a core.
    """
    if layout == "shared":
        return [NodeCores(num_threads=num_threads or len(cores), cores=None)] * num_nodes
    if num_nodes > len(cores):
        raise ConfigError(
            f"--layout split: {num_nodes} nodes on {len(cores)} cores; use --layout shared"
        )
    ordered = sorted(cores)
    bounds = [len(ordered) * node // num_nodes for node in range(num_nodes + 1)]
    shares = [tuple(ordered[bounds[node] : bounds[node + 1]]) for node in range(num_nodes)]
    return [
        NodeCores(num_threads=min(num_threads or len(share), len(share)), cores=share)
        for share in shares
    ]


def take_cores() -> None:
    """Move this process to the cores that its launcher chose; call before threads start."""
    cores = os.environ.get(CORES_VARIABLE)
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
