"""The engine plan: one file that describes an engine whole, its nodes, links and policies.

Owns the plan's structure and each node's part of it. Flags become a plan in
topspin.plan.from_flags, topspin.plan.file reads and prints one, topspin.plan.rules.checks refuses
those that no engine could run. Launch, scheduler and nodes know no other description of the engine.

Limits and policies are in the plan (`micro_batches: null` is "measured while serving"); facts of
a run are not: block counts, the current number of micro-batches, expert tables, sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from topspin.devices import KernelName, NodeRole, Place, share_a_device
from topspin.errors import ConfigError
from topspin.plan.expected import Expected
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.local_experts import LocalExperts
from topspin.plan.network import LOCALHOST, NetworkSpec
from topspin.plan.precision import PrecisionRule
from topspin.plan.setting import AUTO, Setting
from topspin.plan.settings import (
    CPU_BATCH,
    CPU_KV_CACHE_BYTES,
    GPU_BATCH,
    Amount,
    BalancePolicy,
    Count,
    Dtype,
    ExecutionPolicy,
    FailoverPolicy,
    GatewaySection,
    Payload,
    Positive,
    SchedulingPolicy,
    Section,
    TraceSection,
    Transport,
)
from topspin.plan.speculation import Speculation, parse_speculation
from topspin.plan.stages import Stage
from topspin.units import format_size, parse_object, parse_size

Index = Annotated[int, Meta(ge=0, le=1023)]
Wait = Literal["block", "spin"]


class NodeSpec(Section, frozen=True, kw_only=True, tag_field="role", omit_defaults=True):
    """One node.

    `device` is "cpu" or "cuda:N". `cores` are those that belong to this node alone (empty: it
    shares all cores of the host), `num_threads` None: as many threads as its cores. `wait`: how it
    waits within a step. `slow` k emulates a device that takes k times as long: the node sleeps for
    k - 1 times its own computing, on the CPU only. `host`: where others reach it, with
    `EnginePlan.network`; `key`: the group of its keys (None: its role's). The engine is ready
    without an `optional` node, which joins late and may leave again
    (server.scheduler.nodes.failover). `layers`: those from the first number to before the second
    (topspin.plan.stages); None: all. `product`: the GPU's name as its driver tells it, by which
    `topspin deploy` chooses hosts; None: any.
    """

    role: ClassVar[NodeRole]

    index: Index
    device: str
    kernels: KernelName
    wait: Wait
    num_threads: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        Setting(
            "threads of each node; auto: all cores that its process may use",
            flag="--num-threads N",
            unset=AUTO,
        ),
    ] = None
    cores: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    host: str = LOCALHOST
    address: str | None = None
    key: str | None = None
    optional: bool = False
    layers: tuple[int, int] | None = None
    slow: Annotated[float, Meta(ge=1, le=1000)] = 1.0
    product: str | None = None

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

    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=65536)],
        Setting(
            "sequences that run at once on an attention node; auto: "
            f"{CPU_BATCH.max_num_seqs} on the CPU, {GPU_BATCH.max_num_seqs} on a GPU",
            flag="--max-num-seqs N",
            unset=AUTO,
            group="scheduling",
        ),
    ]
    max_num_batched_tokens: Annotated[
        Count,
        Setting(
            "tokens per step and attention node; longer prompts go in chunks; auto: "
            f"{CPU_BATCH.max_num_batched_tokens} on the CPU, "
            f"{GPU_BATCH.max_num_batched_tokens} on a GPU",
            flag="--max-num-batched-tokens N",
            unset=AUTO,
            group="scheduling",
        ),
    ]
    kv_cache_bytes: Annotated[
        Annotated[int, Meta(ge=1, le=2**50)] | None,
        Setting(
            "KV cache of each attention node, its codes for retrieval included, for example 2GiB; "
            f"auto: {format_size(CPU_KV_CACHE_BYTES)} on the CPU, what fits on a GPU",
            flag="--kv-cache-memory SIZE",
            parse=parse_size,
            unset=AUTO,
            group="kv_cache",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Setting(
            "share of a GPU's memory that a node may fill with weights, buffers and KV cache",
            flag="--gpu-memory-utilization SHARE",
            group="kv_cache",
        ),
    ] = 0.9


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
    """The data plane between all attention and all expert nodes.

    `payload` fp8 and int8 compress requests (with a scale per row); answers are bf16. Idle nodes
    always block, whatever a node's `wait` is. A micro-batch of more than `window_rows` token rows
    goes in several windows; they are larger over cuda_ipc, where an expert node reads all weights
    for each. `latency_us` (one way) and `gbps` (None: no limit) emulate a link. A step in which a
    node waits longer than `deadline_s` for another has failed; it limits one wait, not the step.
    """

    between: tuple[Literal["attention"], Literal["expert"]] = ("attention", "expert")
    transport: Annotated[
        Transport,
        Setting(
            "between attention and expert nodes; local: all nodes in one process; cuda_ipc: "
            "GPUs of one host; nixl needs pip install -e '.[rdma]'; auto: local on one GPU, "
            "cuda_ipc between several, else shm, unless --layout auto finds one process faster",
            flag="--transport",
            unset=AUTO,
        ),
    ]
    payload: Annotated[
        Payload,
        Setting(
            "how rows travel between nodes; auto: in the model's dtype; fp8, int8: compressed "
            "to the experts, bf16 back",
            flag="--m2n-payload",
            unset=AUTO,
        ),
    ]
    # A GPU's kernels have one program per row, and this is the most.
    window_rows: Annotated[int, Meta(ge=1, le=2**16 - 1)]
    latency_us: Amount = 0.0
    gbps: Positive | None = None
    deadline_s: Positive = 30.0


class PlannedModel(Section, frozen=True, kw_only=True):
    """The checkpoint (a directory, a hub id, or the default model's name) and how it is served.

    `hf_overrides` replace fields of its config.json (models.description.overrides). Activations,
    embeddings, routers and norms are in `dtype`, and all weights that no precision rule covers.
    """

    path: str
    dtype: Annotated[
        Dtype,
        Setting(
            "type of weights and activations; auto: the checkpoint's", flag="--dtype", unset=AUTO
        ),
    ]
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1, le=2**24)],
        Setting(
            "longest sequence, prompt and output together; auto: the model's own limit",
            flag="--max-model-len TOKENS",
            unset=AUTO,
        ),
    ]
    hf_overrides: Annotated[
        dict[str, Any] | None,
        Setting(
            "fields that replace those of the model's config.json, as JSON, to extend its limit: "
            "max_position_embeddings, rope_theta and rope_scaling",
            flag="--hf-overrides JSON",
            parse=parse_object,
            unset="none",
        ),
    ] = None


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
    """One engine; topspin.plan.rules.checks must hold before it is started. `speculation` null:
    off.

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
    speculation: Annotated[
        Speculation | None,
        Setting(
            "guess tokens by what was written before or with a draft model, as JSON with vLLM's "
            'keys, for example {"method": "suffix", "num_speculative_tokens": 7}, or off; output '
            "is the same; auto: suffix, on CPUs and without retrieval",
            flag="--speculative-config JSON",
            parse=parse_speculation,
            unset=AUTO,
        ),
    ] = None
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
    def layer_ranges(self) -> tuple[Stage, ...]:
        """Return the layers of the stages, by index; the plan is a checked one."""
        cut = [(node.of, node.layers) for node in self.stages]
        return tuple(Stage(of, *layers) for of, layers in cut if layers is not None)

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
            stages=self.layer_ranges,
            of=self.attention[own.of] if isinstance(own, StageNode) else None,
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
