"""An engine as the services that a cluster runs: which processes, how many, with what.

Owns the typed model that deploy.kubernetes and deploy.compose render, the grouping of a plan's
nodes, and the plan that these processes are given, in which hosts and devices are those of their
containers. Pure: knows no manifest and reads no file.

An engine whose nodes share memory in one process, or whose GPUs do, is one container ("whole").
Otherwise scheduler, gateways and nodes are apart; nodes joined by shm are containers of one pod.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from deploy.services.contained import MODELS, contained
from models.sources.hub import DEFAULT_MODEL
from topspin import __version__
from topspin.errors import ConfigError
from topspin.plan.network import LOCALHOST, NetworkSpec
from topspin.plan.rules.checks import check_plan
from topspin.plan.spec import AttentionNode, DraftNode, EnginePlan, ExpertNode, NodeSpec, StageNode
from topspin.plan.speculation import SELF_INT4

CONTROL_PORT: Final = 7000
HTTP_PORT: Final = 8000
DRAFT_PORT: Final = 7100

REVISION_DIGITS: Final = 8
MAX_NAME: Final = 24
"""With the revision, a role and a pod's number it is a DNS label, of at most 63 characters."""

SPILL: Final = "/topspin/spill"
"""Where nodes keep keys in files, whatever directory of a host the plan names."""
SPILL_MARGIN: Final = 1.25
"""A file has sums and whole pages beside the keys and values."""

RESTART_DEADLINE_S: Final = 300.0
"""A lost pod is scheduled and reads its weights again before its requests are given up."""

Node = AttentionNode | StageNode | ExpertNode | DraftNode
MemoryOf = Callable[[NodeSpec], int | None]


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """What a plan does not say.

    `gateways` (of a whole engine: engines; None: two, or one whole engine) start at once, and more
    by load. `prometheus` is where autoscalers ask for metrics. `cpus`: the threads of nodes on CPUs
    to which the plan gives none. `models`: the folder of this host that containers have at MODELS.
    """

    name: str = "topspin"
    image: str
    gateways: int | None = None
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"
    rdma_resource: str = "rdma/hca"
    cpus: int | None = None
    models: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes of one role that differ by their index only, in its order.

    `name` is unique in the engine. Nodes of a pod that shares memory are all the pod's.
    """

    name: str
    nodes: tuple[Node, ...]

    @property
    def role(self) -> str:
        """Return the role of its nodes."""
        return self.nodes[0].role

    @property
    def first(self) -> int:
        """Return the index of its first node."""
        return self.nodes[0].index

    @property
    def is_optional(self) -> bool:
        """Say whether the engine serves without these nodes."""
        return self.nodes[0].optional


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One revision of an engine. `plan` is given to its processes; `asked` as it was."""

    asked: DeployOptions
    revision: str
    plan: EnginePlan
    groups: tuple[Group, ...]
    memory_of: MemoryOf

    @property
    def name(self) -> str:
        """Return the name of this revision."""
        return f"{self.asked.name}-{self.revision}"

    @property
    def is_whole(self) -> bool:
        """Say whether all of it is one container."""
        return is_whole(self.plan)

    @property
    def shares_memory(self) -> bool:
        """Say whether the nodes but those that draft are one pod."""
        return shares_memory(self.plan)

    @property
    def replicas(self) -> int:
        """Return how many gateways, or whole engines, start."""
        return self.asked.gateways or (1 if self.is_whole else 2)

    @property
    def num_gpus(self) -> int:
        """Return the GPUs of a whole engine: they are numbered from 0, those between included."""
        nodes = [node for node in self.plan.nodes if node.place.is_gpu]
        return max((int(node.device.partition(":")[2]) + 1 for node in nodes), default=0)

    def spill_bytes(self, nodes: Iterable[NodeSpec]) -> int:
        """Return the size of the files in which nodes keep keys; 0: they keep none."""
        spill = self.plan.kv_cache.spill
        if spill is None or spill.is_in_host_memory:
            return 0
        num_files = sum(node.role in ("attention", "stage") for node in nodes)
        return round(num_files * spill.size_bytes * SPILL_MARGIN)

    def listens(self, node: NodeSpec) -> bool:
        """Say whether others connect to a node over the network."""
        has_rows = node.role in ("expert", "stage") and not self.shares_memory
        return node.role == "draft" or has_rows

    @property
    def pulled(self) -> list[str]:
        """Return the models that are brought before the engine starts, by name."""
        names = [self.plan.model.path]
        speculation = self.plan.speculation
        if speculation is not None and speculation.model not in (None, SELF_INT4):
            names.append(speculation.model)
        if self.asked.models is not None:
            return []
        return [name for name in names if not name.startswith("/")]

    @property
    def key_groups(self) -> list[str]:
        """Return the groups of processes that have keys; none: nothing travels."""
        return [] if self.is_whole else sorted(self.plan.key_groups)


def is_whole(plan: EnginePlan) -> bool:
    """Say whether an engine can only be one container: one process, or GPUs that share memory."""
    return plan.link.transport in ("local", "cuda_ipc")


def shares_memory(plan: EnginePlan) -> bool:
    """Say whether all nodes but those that draft are on one host, as containers of one pod."""
    return plan.link.transport == "shm"


class Location(NamedTuple):
    """The place of a process: pod `number` of the like ones of `pods`, or `service` by itself."""

    pods: str
    number: int
    service: str


SCHEDULER: Final = Location("scheduler", 0, "scheduler")
JOINED: Final = Location("nodes", 0, "nodes")
"""Of nodes that share memory, which are all on one host."""

HostOf = Callable[[str, Location], str]
"""From an engine's name and a place to the host name by which its process is reached."""


def engine_of(
    plan: EnginePlan, asked: DeployOptions, *, host_of: HostOf, memory_of: MemoryOf
) -> Engine:
    """Return the services of a plan. Raises ConfigError for what a cluster cannot run."""
    check_asked(asked)
    plan = contained(plan, cpus=asked.cpus, models=asked.models)
    revision = _revision(plan, asked)
    groups = tuple(_groups(plan))
    if is_whole(plan):
        placed = _on_one_host(_spilling(plan))
    elif plan.failover.standby == "weights":
        raise ConfigError(
            "failover.standby weights: a node's pod starts one process, so that there would be no "
            "spare nodes; use failover.standby imports"
        )
    else:
        placed = _apart(_spilling(plan), f"{asked.name}-{revision}", groups, host_of)
        groups = tuple(_groups(placed))
    check_plan(placed)
    engine = Engine(asked=asked, revision=revision, plan=placed, groups=groups, memory_of=memory_of)
    _check_models(engine)
    return engine


def check_asked(asked: DeployOptions) -> None:
    """Raise ConfigError for settings that no cluster takes."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", asked.name) or len(asked.name) > MAX_NAME:
        raise ConfigError(
            f"--name {asked.name!r}: give a DNS label of at most {MAX_NAME} characters: a letter, "
            "then lower-case letters, digits and hyphens"
        )
    if not asked.image or any(each.isspace() for each in asked.image):
        raise ConfigError(f"--image {asked.image!r} is no name of an image")
    if asked.gateways is not None and not 1 <= asked.gateways <= 1024:
        raise ConfigError(f"--gateways {asked.gateways}: give a number between 1 and 1024")


def _check_models(engine: Engine) -> None:
    """Raise ConfigError for a checkpoint that containers would not find."""
    speculation = engine.plan.speculation
    for name in (engine.plan.model.path, speculation.model if speculation else None):
        if name is None or name in (DEFAULT_MODEL, SELF_INT4) or name.startswith(f"{MODELS}/"):
            continue
        if name.startswith(("/", ".", "~")) or name.count("/") != 1:
            raise ConfigError(
                f"the plan's model {name}: a directory of this host; in containers checkpoints are "
                f"below {MODELS}: give --models DIR, the folder above it that they have there"
            )


def _revision(plan: EnginePlan, asked: DeployOptions) -> str:
    """Return a name of what runs: processes of two revisions never meet."""
    # The version too: another one may write the same plan in another way.
    what = f"{__version__}\n{asked.image}\n".encode() + msgspec.json.encode(plan)
    return hashlib.sha256(what).hexdigest()[:REVISION_DIGITS]


def _spilling(plan: EnginePlan) -> EnginePlan:
    """Return the plan with the containers' place of files of keys, which their user may write."""
    spill = plan.kv_cache.spill
    if spill is None or spill.is_in_host_memory:
        return plan
    spill = msgspec.structs.replace(spill, directory=SPILL)
    kv_cache = msgspec.structs.replace(plan.kv_cache, spill=spill)
    return msgspec.structs.replace(plan, kv_cache=kv_cache)


def _on_one_host(plan: EnginePlan) -> EnginePlan:
    """Return the plan of an engine in one container, which finds its processes by itself."""
    nodes = (
        msgspec.structs.replace(_without_cores(node), host=LOCALHOST, address=None, key=None)
        for node in plan.nodes
    )
    return msgspec.structs.replace(plan, nodes=tuple(nodes), network=None)


def _apart(plan: EnginePlan, name: str, groups: tuple[Group, ...], host_of: HostOf) -> EnginePlan:
    """Return the plan of processes that each have a container."""
    trusted = plan.network is not None and plan.network.trusted
    placed: dict[tuple[str, int], Node] = {}
    for group in groups:
        for node in group.nodes:
            location = Location(group.name, node.index - group.first, f"{node.role}-{node.index}")
            is_joined = shares_memory(plan) and node.role != "draft"
            changes: dict[str, object] = {"host": host_of(name, JOINED if is_joined else location)}
            if isinstance(node, DraftNode):
                changes["address"] = f"tcp://{changes['host']}:{DRAFT_PORT}"
            if node.place.is_gpu:
                changes["device"] = "cuda:0"  # a container sees its own only
            own = msgspec.structs.replace(_without_cores(node), **changes)
            placed[node.role, node.index] = own
    failover = msgspec.structs.replace(
        plan.failover,
        restart=True,
        restart_deadline_s=max(plan.failover.restart_deadline_s, RESTART_DEADLINE_S),
    )
    return msgspec.structs.replace(
        plan,
        nodes=tuple(placed[node.role, node.index] for node in plan.nodes),
        network=NetworkSpec(
            control=f"tcp://{host_of(name, SCHEDULER)}:{CONTROL_PORT}", trusted=trusted
        ),
        failover=failover,
    )


def _without_cores(node: Node) -> Node:
    """Return a node with as many threads as it had cores: a container's have other numbers."""
    if not node.cores:
        return node
    threads = min(node.num_threads or len(node.cores), len(node.cores))
    return msgspec.structs.replace(node, cores=(), num_threads=threads)


def _groups(plan: EnginePlan) -> Iterator[Group]:
    """Yield the runs of nodes that are alike."""
    for role in ("attention", "stage", "expert", "draft"):
        nodes = [node for node in plan.nodes if node.role == role]
        runs = [tuple(run) for _, run in groupby(nodes, key=_likeness)]
        for run in runs:
            first = run[0].index
            yield Group(name=f"{role}-{first}" if first else role, nodes=run)


def _likeness(node: Node) -> bytes:
    """Return all of a node but where it is."""
    plain = msgspec.structs.replace(
        node, index=0, host=LOCALHOST, address=None, device="cuda:0" if node.place.is_gpu else "cpu"
    )
    return msgspec.json.encode(plain)


def threads_of(node: NodeSpec) -> int:
    """Return the cores that a node needs. Raises ConfigError if the plan does not say."""
    if node.place.is_gpu:
        return node.num_threads or 2
    if node.num_threads is None:
        raise ConfigError(
            f"{node}: num_threads null is every core of a host; give --cpus N, the cores that its "
            "container has"
        )
    return node.num_threads
