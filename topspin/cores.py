"""The layout: each node's cores and threads on one host, and the setup of its process.

Owns the layouts and the environment of a node process: OpenMP, heap, cores. Knows the numbers of
nodes and cores, starts no node and measures nothing. app.launch.calibrate chooses between
layouts, app.launch.engine gives each node its environment; a node without a launcher (in its
own container) sets it by settle_process().

"shared": every node uses all cores and they take turns, so waits block at once. "split": every node
has separate cores, so waits spin (a wake-up between cores costs 20 us).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from topspin.errors import ConfigError

Between = Literal["local", "shm", "tcp"]
Layout = Literal["shared", "split"]
DEFAULT_LAYOUT: Final[Layout] = "shared"

CORES_VARIABLE = "TOPSPIN_CORES"
"""Cores of a node process, with commas; empty: all. Set: its environment is complete."""

SPIN_COUNT = 3000
"""The number of times that an idle OpenMP thread looks for work before it sleeps.

Short spins between the parallel regions of one layer help; libgomp's default (milliseconds) takes
the cores from the node whose turn it is: a step becomes several times slower.
"""


class LayoutChoice(NamedTuple):
    """A measured layout; `num_threads` None: all cores of the node's process."""

    layout: Layout
    transport: Between
    num_threads: int | None = None


def split_cores(cores: Sequence[int], num_nodes: int) -> list[tuple[int, ...]]:
    """Return the cores of each of `num_nodes` nodes; raises ConfigError if one gets none."""
    if num_nodes > len(cores):
        raise ConfigError(
            f"--layout split: {num_nodes} nodes on {len(cores)} cores; use --layout shared"
        )
    ordered = sorted(cores)
    bounds = [len(ordered) * node // num_nodes for node in range(num_nodes + 1)]
    return [tuple(ordered[bounds[node] : bounds[node + 1]]) for node in range(num_nodes)]


def node_environment(
    user: Mapping[str, str],
    *,
    num_threads: int | None = None,
    spin_count: int = SPIN_COUNT,
    cores: Sequence[int] = (),
    takes_turns: bool = False,
    on_device: bool = False,
) -> dict[str, str]:
    """Return the environment of a node process; variables set in `user` are kept.

    A number in `num_threads` overrides `user`; None: the value in `user`, else all cores that the
    process may use. `cores`: those that belong to this node alone. Threads of nodes that take turns
    on the same cores are bound to them, which measured best. Not bound are threads of nodes with
    fewer threads than cores (all would get the same first cores) and of a process that computes
    alone (it can avoid cores that other processes use). A node `on_device` computes on the host
    only while it loads: its heap is the usual one.
    """
    available = len(cores) or len(os.sched_getaffinity(0))
    most = min(num_threads, available) if num_threads and cores else num_threads
    threads = str(most) if most else user.get("OMP_NUM_THREADS", str(available))
    settings = {"OMP_NUM_THREADS": threads, "GOMP_SPINCOUNT": str(spin_count)}
    if takes_turns and threads == str(available):
        settings |= {"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"}
    if not on_device:
        settings["GLIBC_TUNABLES"] = _HEAP
    wins = {"OMP_NUM_THREADS"} if most else set()
    kept = {name: value for name, value in settings.items() if name in wins or name not in user}
    return {**kept, CORES_VARIABLE: ",".join(map(str, cores))}


# Decoding reads all weights in every step: on huge pages that takes 5 to 10 % less time. glibc asks
# for them in its heap only, so large blocks are taken from there too; and heap memory is not
# returned and faulted in again with every large temporary.
_HEAP: Final = ":".join(
    f"glibc.malloc.{setting}"
    for setting in ("hugetlb=1", f"mmap_threshold={2**30}", f"trim_threshold={2**28}")
)


def settle_process() -> None:
    """Give this node process its environment and cores; call before torch is imported.

    The libraries read the environment when a process starts. So a process without it (no launcher)
    re-executes itself with the environment of a node that computes alone.
    """
    if CORES_VARIABLE not in os.environ:
        os.environ.update(node_environment(os.environ))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    take_cores()


def take_cores() -> None:
    """Move this process to its own cores, if it has any; call before threads start."""
    if cores := os.environ.get(CORES_VARIABLE):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
