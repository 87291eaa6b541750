"""The engine plan: one file that describes an engine whole, its nodes, links and policies.

Owns the plan's structure, the checks that need no model and no machine, and each node's part of
it. Flags become a plan in topspin.plan.from_flags; topspin.plan.file reads and prints one. Launch,
scheduler and nodes know no other description of the engine.

Limits and policies are in the plan (`micro_batches: null` is "measured while serving"); facts of
a run are not: block counts, the current number of micro-batches, expert tables, sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from topspin.devices import (
    KernelName,
    NodeRole,
    Place,
    check_transport,
    parse_device,
    share_a_device,
)
from topspin.errors import ConfigError
from topspin.plan.expected import Expected
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.local_experts import LocalExperts
from topspin.plan.network import LOCALHOST, NetworkSpec, check_network
from topspin.plan.optional import check_optional
from topspin.plan.precision import PrecisionRule
from topspin.plan.retrieval import SpillSpec
from topspin.plan.setting import check_ranges
from topspin.plan.settings import (
    BalancePolicy,
    Dtype,
    ExecutionPolicy,
    FailoverPolicy,
    GatewaySection,
    SchedulingPolicy,
    Section,
    TraceSection,
    Transport,
)
from topspin.plan.speculation import Speculation
from topspin.plan.stages import Stage, check_stages, stages_of

# A plan travels as JSON, which has no infinity.
FINITE = 1e9

Count = Annotated[int, Meta(ge=1, le=2**20)]
Index = Annotated[int, Meta(ge=0, le=1023)]
Payload = Literal["bf16", "fp32", "fp8", "int8"]
Wait = Literal["block", "spin"]


class NodeSpec(Section, frozen=True, kw_only=True, tag_field="role", omit_defaults=True):
    """One node.

    `device` is "cpu" or "cuda:N". `cores` are those that belong to this node alone (empty: it
    shares all cores of the host), `num_threads` None: as many threads as its cores. `wait`: how it
    waits within a step. `slow` k emulates a device that takes k times as long: the node sleeps for
    k - 1 times its own computing, on the CPU only. `host`: where others reach it, with
    `EnginePlan.network`; `key`: the group of its keys (None: its role's). The engine is ready
    without an `optional` node (topspin.plan.optional). Not served yet, and refused unless left out:
    a device group (`tp`), a single one of the `phases`. `layers`: those from the first number to
    before the second (topspin.plan.stages); None: all.
    """

    role: ClassVar[NodeRole]

    index: Index
    device: str
    kernels: KernelName
    wait: Wait
    num_threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    cores: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    host: str = LOCALHOST
    address: str | None = None
    key: str | None = None
    optional: bool = False
    tp: Count = 1
    layers: tuple[int, int] | None = None
    phases: Literal["both", "prefill", "decode"] = "both"
    slow: Annotated[float, Meta(ge=1, le=1000)] = 1.0

    @property
    def key_group(self) -> str:
        """Return the group whose keys it has, where nodes have keys (topspin.processes.keys)."""
        return self.key or self.role

    @property
    def place(self) -> Place:
        """Return where it computes, and with which kernels."""
        return Place(self.device, self.kernels)

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


class AttentionNode(NodeSpec, frozen=True, kw_only=True, tag="attention"):
    """A replica of everything but the routed experts, with a KV cache of its own.

    `max_num_seqs` sequences run at once, with `max_num_batched_tokens` tokens per step.
    `kv_cache_bytes` null, on a GPU: what `gpu_memory_utilization` of its memory leaves.
    """

    role: ClassVar[NodeRole] = "attention"

    max_num_seqs: Annotated[int, Meta(ge=1, le=65536)]
    max_num_batched_tokens: Count
    kv_cache_bytes: Annotated[int, Meta(ge=1, le=2**50)] | None = None
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9


class StageNode(NodeSpec, frozen=True, kw_only=True, tag="stage"):
    """Computes `layers` of attention node `of`, whose own layers come before, and keeps their keys.

    Embeddings, LM head, sampling and the sequences' tokens stay on the attention node.
    """

    role: ClassVar[NodeRole] = "stage"

    of: Index
    kv_cache_bytes: Annotated[int, Meta(ge=1, le=2**50)]


class ExpertNode(NodeSpec, frozen=True, kw_only=True, tag="expert"):
    """Holds `experts` of the routed experts of each MoE layer; which ones, the table says."""

    role: ClassVar[NodeRole] = "expert"

    experts: Count


class DraftNode(NodeSpec, frozen=True, kw_only=True, tag="draft"):
    """Computes the draft model of `speculation` while attention nodes verify.

    Attention node i asks draft node i modulo their number. Its cache has room for
    `kv_cache_tokens` tokens, on a GPU too. The launcher gives the `address`.
    """

    role: ClassVar[NodeRole] = "draft"

    kv_cache_tokens: Count


class LinkSpec(Section, frozen=True, kw_only=True):
    """The data plane between all attention and all expert nodes; fields as in M2NSection."""

    between: tuple[Literal["attention"], Literal["expert"]] = ("attention", "expert")
    transport: Transport
    payload: Payload
    window_rows: Annotated[int, Meta(ge=1, le=2**16 - 1)]
    latency_us: Annotated[float, Meta(ge=0, le=FINITE)] = 0.0
    gbps: Annotated[float, Meta(gt=0, le=FINITE)] | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=FINITE)] = 30.0


class PlannedModel(Section, frozen=True, kw_only=True):
    """The checkpoint (a directory, a hub id, or the default model's name) and how it is served.

    `hf_overrides` replace fields of its config.json (models.description.overrides).
    """

    path: str
    dtype: Dtype
    max_model_len: Annotated[int, Meta(ge=1, le=2**24)]
    hf_overrides: dict[str, Any] | None = None


class NodeConfig(Section, frozen=True, kw_only=True):
    """The part of the plan that one node gets in its Welcome.

    `batch_rows`: the most token rows that reach an expert node in one batch. `shares_device`: all
    nodes of the engine are one process on one device. `speculation` None: off; `draft_address` is
    the address of an attention node's draft node, `draft_group` the group of its keys.
    `micro_batches`: the number in every step; None: it varies. `local_layers`: decoder layers whose
    routed experts attention nodes hold too. `num_attention`: the nodes that send rows to each
    expert node, stages too. `stages` are those of the engine; `of` is the attention node of a
    stage. `leave_deadline_s`: a node that was asked to end does so within this time; None: at once.
    """

    node: AttentionNode | StageNode | ExpertNode | DraftNode
    model: PlannedModel
    precision: tuple[PrecisionRule, ...]
    kv_cache: KvCacheSpec
    link: LinkSpec
    execution: ExecutionPolicy
    num_attention: int
    num_experts: int
    batch_rows: int
    shares_device: bool
    speculation: Speculation | None = None
    draft_address: str | None = None
    draft_group: str | None = None
    micro_batches: int | None = None
    restart: bool = False
    leave_deadline_s: float | None = None
    trace: TraceSection = TraceSection()
    local_layers: tuple[int, ...] = ()
    stages: tuple[Stage, ...] = ()
    of: AttentionNode | None = None

    @property
    def attention(self) -> AttentionNode:
        """Return the spec of an attention node; a stage has the limits of its attention node."""
        if isinstance(self.node, StageNode):
            assert self.of is not None
            return msgspec.structs.replace(self.of, kv_cache_bytes=self.node.kv_cache_bytes)
        assert isinstance(self.node, AttentionNode), f"{self.node} is no attention node"
        return self.node

    @property
    def stage(self) -> StageNode:
        """Return the node's spec, for stages."""
        assert isinstance(self.node, StageNode), f"{self.node} is no stage"
        return self.node

    @property
    def draft(self) -> DraftNode:
        """Return the node's spec, for draft nodes."""
        assert isinstance(self.node, DraftNode), f"{self.node} is no draft node"
        return self.node


class EnginePlan(Section, frozen=True, kw_only=True):
    """One engine. `check()` must hold before anything is started. `speculation` null: off.

    `network` null: one host. `expected`: the planner's figures, for comparison only.
    """

    version: Literal[1] = 1
    model: PlannedModel
    precision: tuple[PrecisionRule, ...] = ()
    kv_cache: KvCacheSpec = KvCacheSpec()
    nodes: tuple[AttentionNode | StageNode | ExpertNode | DraftNode, ...]
    links: tuple[LinkSpec, ...]
    execution: ExecutionPolicy = ExecutionPolicy()
    scheduling: SchedulingPolicy = SchedulingPolicy()
    speculation: Speculation | None = None
    balance: BalancePolicy = BalancePolicy()
    failover: FailoverPolicy = FailoverPolicy()
    trace: TraceSection = TraceSection()
    local_experts: LocalExperts | None = None
    network: NetworkSpec | None = None
    expected: Expected | None = None

    @property
    def attention(self) -> list[AttentionNode]:
        """Return the attention nodes by index."""
        return [node for node in self.nodes if isinstance(node, AttentionNode)]

    @property
    def stages(self) -> list[StageNode]:
        """Return the stages by index; none: attention nodes compute all layers."""
        return [node for node in self.nodes if isinstance(node, StageNode)]

    @property
    def experts(self) -> list[ExpertNode]:
        """Return the expert nodes by index; none for a dense model."""
        return [node for node in self.nodes if isinstance(node, ExpertNode)]

    @property
    def drafts(self) -> list[DraftNode]:
        """Return the draft nodes by index; none: attention nodes draft for themselves."""
        return [node for node in self.nodes if isinstance(node, DraftNode)]

    @property
    def key_groups(self) -> set[str]:
        """Return the groups of processes that have keys of their own (topspin.processes.keys)."""
        return {"scheduler", "gateway", *(node.key_group for node in self.nodes)}

    def key_group_of(self, role: str, index: int) -> str:
        """Return the group whose keys process `index` of `role` has, where there are keys."""
        own = [each.key_group for each in self.nodes if (each.role, each.index) == (role, index)]
        return own[0] if own else role

    @property
    def link(self) -> LinkSpec:
        """Return the link between attention and expert nodes."""
        return self.links[0]

    @property
    def is_one_process(self) -> bool:
        """Say whether all attention and expert nodes are threads of one process."""
        return self.link.transport == "local"

    @property
    def shares_device(self) -> bool:
        """Say whether all nodes are one process on one device (topspin.devices.Place)."""
        places = [node.place for node in (*self.attention, *self.experts)]
        return self.is_one_process and bool(self.experts) and share_a_device(places)

    def for_node(self, role: NodeRole = "attention", index: int = 0) -> NodeConfig:
        """Return the part that node `index` of `role` gets."""
        nodes: dict[NodeRole, Sequence[AttentionNode | StageNode | ExpertNode | DraftNode]] = {
            "attention": self.attention,
            "stage": self.stages,
            "expert": self.experts,
            "draft": self.drafts,
        }
        own = nodes[role][index]
        draft = None
        if role == "attention" and self.drafts:
            draft = self.drafts[index % len(self.drafts)]
        tokens = [node.max_num_batched_tokens for node in self.attention]
        window = min(self.link.window_rows, max(tokens))
        rows = max(tokens) if self.is_one_process else sum(min(each, window) for each in tokens)
        return NodeConfig(
            node=own,
            model=self.model,
            precision=self.precision,
            kv_cache=self.kv_cache,
            link=msgspec.structs.replace(self.link, window_rows=window),
            execution=self.execution,
            num_attention=len(self.attention) + len(self.stages),
            num_experts=len(self.experts),
            batch_rows=rows,
            shares_device=self.shares_device,
            speculation=self.speculation,
            draft_address=None if draft is None else draft.address,
            draft_group=None if draft is None else draft.key_group,
            micro_batches=self.scheduling.micro_batches,
            restart=self.failover.restart,
            leave_deadline_s=self.failover.halt_deadline_s if self.failover.restart else None,
            trace=self.trace,
            local_layers=() if self.local_experts is None else self.local_experts.layers,
            stages=stages_of(self.stages),
            of=self.attention[own.of] if isinstance(own, StageNode) else None,
        )

    def check(self) -> None:
        """Raise ConfigError, naming the field, for a plan that no engine could run."""
        check_ranges(self, by_flag=False)
        for idx, node in enumerate(self.nodes):
            _check_node(node, where=f"nodes[{idx}] ({node})")
        _check_indices("attention", self.attention)
        _check_indices("stage", self.stages)
        _check_indices("expert", self.experts)
        _check_indices("draft", self.drafts)
        self._check_drafts()
        if not self.attention:
            raise ConfigError("nodes: an engine needs an attention node")
        check_network(self)
        check_stages(self)
        check_optional(self)
        if len(self.links) != 1:
            raise ConfigError(
                f"links: {len(self.links)} of them; one link joins all attention and expert nodes"
            )
        self._check_kv_cache()
        self._check_cores()
        self._check_threads()
        check_transport(
            [node.place for node in (*self.attention, *self.stages)],
            [node.place for node in self.experts],
            self.link.transport,
        )
        self._check_effect()
        self._check_kernels()
        if self.local_experts is not None:
            self._check_local(self.local_experts)

    def _check_kv_cache(self) -> None:
        """Check that the kernels of all attention nodes can keep and read keys as they must."""
        kept = self.kv_cache
        kept.check()
        if kept.spill is not None:
            self._check_spill(kept.spill)
        for node in (*self.attention, *self.stages):
            if kept.fp8_setting is not None and node.kernels == "triton":
                raise ConfigError(
                    f"{kept.fp8_setting}: {node} has the kernels triton; only those for the CPU "
                    "keep keys in fp8"
                )
            if kept.retrieval is not None and node.kernels == "deterministic":
                raise ConfigError(
                    f"kv_cache.retrieval (--kv-retrieval-tokens): {node} has the kernels "
                    "deterministic, which attend to all keys"
                )

    def _check_spill(self, spill: SpillSpec) -> None:
        """Check that nothing needs keys whole that are not in memory."""
        if self.speculation is not None and self.speculation.branches:
            raise ConfigError(
                "kv_cache.spill (--kv-spill-dir): drafts that branch attend to all keys; set "
                "speculation.branches to false"
            )
        place = "the host's memory" if spill.is_in_host_memory else "a file"
        reader = "triton" if spill.is_in_host_memory else "cpu"
        for node in self.attention:
            if node.kernels != reader:
                raise ConfigError(
                    f"kv_cache.spill (--kv-spill-dir): {node} has the kernels {node.kernels}; only "
                    f"{reader} reads selected keys from {place}"
                )

    def _check_drafts(self) -> None:
        """Check that draft nodes have a model, and none is idle."""
        if not self.drafts:
            return
        if self.speculation is None or self.speculation.model is None:
            raise ConfigError(f"{self.drafts[0]}: there is no draft model; give speculation one")
        if len(self.drafts) > len(self.attention):
            raise ConfigError(
                f"nodes: {len(self.drafts)} draft nodes for {len(self.attention)} attention nodes: "
                "each of these asks one"
            )

    def _check_cores(self) -> None:
        """Check that cores belong to one node only, of a process of its own."""
        owner: dict[int, NodeSpec] = {}
        for node in self.nodes:
            if node.cores and self.is_one_process and node.role != "draft":
                raise ConfigError(f"{node}: cores {list(node.cores)}: all nodes are one process")
            for core in node.cores:
                if core in owner:
                    raise ConfigError(f"{node}: core {core} belongs to {owner[core]} already")
                owner[core] = node

    def _check_threads(self) -> None:
        """Check that nodes of one process, whose threads are counted once, agree on the number."""
        first = self.attention[0]
        for node in (*self.attention, *self.experts):
            if self.is_one_process and node.num_threads != first.num_threads:
                raise ConfigError(
                    f"{node}: num_threads {node.num_threads}: all nodes are one process, and "
                    f"{first} has num_threads {first.num_threads}"
                )

    def _check_effect(self) -> None:
        """Check that no option is without effect between nodes on such devices."""
        link, shares_device = self.link, self.shares_device
        plain = "fp32" if self.model.dtype == "float32" else "bf16"
        has_no_link = shares_device or link.transport == "cuda_ipc"
        meaningless = (
            (shares_device and link.payload != plain, f"links[0]: payload {link.payload}"),
            (has_no_link and link.latency_us > 0, f"links[0]: latency_us {link.latency_us:g}"),
            (has_no_link and link.gbps is not None, f"links[0]: gbps {link.gbps}"),
            *((shares_device and n.wait != "block", f"{n}: wait {n.wait}") for n in self.nodes),
        )
        for is_set, option in meaningless:
            if is_set:
                raise ConfigError(
                    f"{option} with transport {link.transport}: kernels of GPUs hand rows over in "
                    "memory, where there is no such thing; leave it out, or use transport shm"
                )
        if self.execution.gpu_streams > 1 and not shares_device:
            raise ConfigError(
                f"execution.gpu_streams {self.execution.gpu_streams}: only attention and experts "
                "on one GPU, in one process, overlap on two streams"
            )

    def _check_kernels(self) -> None:
        """Check that all nodes whose sums show add in a fixed order, or none."""
        for node in (*self.attention, *self.stages, *self.experts):
            if (node.kernels == "deterministic") != self.execution.deterministic:
                raise ConfigError(
                    f"{node}: kernels {node.kernels} with execution.deterministic "
                    f"{str(self.execution.deterministic).lower()}: the kernels `deterministic` and "
                    "that setting need each other"
                )

    def _check_local(self, local: LocalExperts) -> None:
        """Check that layers can be local at some times and not at others."""
        if local.when == "always":
            return
        if self.shares_device:
            raise ConfigError(
                "local_experts: attention and experts share a device, where no layer has a hop; "
                "leave it out"
            )
        plain = "fp32" if self.model.dtype == "float32" else "bf16"
        if self.execution.deterministic and self.link.payload != plain:
            raise ConfigError(
                f"local_experts: payload {self.link.payload} rounds rows on their way, so "
                f"execution.deterministic needs payload {plain}, or when always"
            )


class ServeConfig(Section, frozen=True, kw_only=True):
    """All that the processes of `topspin serve` are given: the engine, and its HTTP side."""

    plan: EnginePlan
    gateway: GatewaySection = GatewaySection()


def load_serve_config(path: str) -> ServeConfig:
    """Read a ServeConfig from the JSON file at `path` (`/dev/fd/N` too); raises ConfigError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=ServeConfig)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error


def _check_node(node: NodeSpec, *, where: str) -> None:
    """Refuse the fields that the engine does not act on yet."""
    neutral: dict[str, tuple[Any, str]] = {
        "tp": (1, "a node is one device"),
        "phases": ("both", "a node serves prefill and decode"),
    }
    for name, (only, reason) in neutral.items():
        value = getattr(node, name)
        if value != only:
            raise ConfigError(f"{where}: {name} {value!r}: {reason} for now; leave it at {only}")
    device = parse_device(f"{where}: device", node.device)
    if device == "cuda" or device != node.device:
        number = "cuda:0" if device == "cuda" else device
        raise ConfigError(f"{where}: device {node.device}: give its number, for example {number}")
    if node.place.is_gpu and node.kernels in ("cpu", "deterministic"):
        raise ConfigError(f"{where}: kernels {node.kernels} compute on the CPU only")
    if node.place.is_gpu and node.cores:
        raise ConfigError(f"{where}: cores: a node on a GPU needs none of its own")
    if node.slow > 1 and node.place.is_device:
        raise ConfigError(
            f"{where}: slow {node.slow:g}: only nodes that compute on the CPU, without the kernels "
            "triton, are slowed down; leave it out"
        )
    if isinstance(node, AttentionNode):
        if node.kv_cache_bytes is None and not node.place.is_gpu:
            raise ConfigError(f"{where}: kv_cache_bytes: a node on the CPU needs a size")
        if node.max_num_batched_tokens < node.max_num_seqs:
            raise ConfigError(
                f"{where}: max_num_batched_tokens {node.max_num_batched_tokens} is less than "
                f"max_num_seqs {node.max_num_seqs}: not every running sequence could advance by a "
                "token in a step"
            )


def _check_indices(role: str, nodes: Sequence[NodeSpec]) -> None:
    found = [node.index for node in nodes]
    if found != list(range(len(nodes))):
        raise ConfigError(f"nodes: {role} nodes have the indices {found}, not 0, 1, ... in order")
