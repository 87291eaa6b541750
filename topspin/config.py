"""The settings of one engine: frozen sections, composed and validated once.

Owns what can be set and its defaults. Knows no command line (topspin.cli fills the
sections), no tensors and no sockets. topspin.resolve checks them and turns every "auto"
into a concrete value; it returns a new object, and nobody changes a section afterwards. A
role receives only its part: nodes get a NodeConfig in the scheduler's Welcome.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from topspin.devices import (
    CPU,
    NodeRole,
    Nodes,
    Place,
    assign_devices,
)
from topspin.errors import ConfigError

DETERMINISTIC_KERNELS = "deterministic"
CPU_KV_CACHE_BYTES = 256 * 2**20
WINDOW_ROWS = 512
GPU_WINDOW_ROWS = 2048

Transport = Literal["local", "shm", "tcp", "nixl", "cuda_ipc"]
Dtype = Literal["float32", "bfloat16"]
Payload = Literal["auto", "bf16", "fp32", "fp8", "int8"]
Quantization = Literal["none", "int8", "int4", "fp8"]
QUANTIZATIONS = {"cpu": ("int8", "int4"), "triton": ("int8", "int4", "fp8")}


class BatchLimits(NamedTuple):
    """Sequences that run at once on an attention node, and tokens of a step there."""

    max_num_seqs: int
    max_num_batched_tokens: int


CPU_BATCH = BatchLimits(64, 512)
# A GPU is far from its arithmetic's limit at a few hundred rows, and prompts should fill it.
GPU_BATCH = BatchLimits(256, 8192)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of settings that one part of the system reads."""


class ModelSection(Section, frozen=True, kw_only=True):
    """What is served: a checkpoint directory and how it is read.

    `quantization`: routed experts, shared experts, dense MLPs and attention projections are
    kept in so many bits and the LM head in 8, quantised as they are read; embeddings, routers
    and norms stay in `dtype`, as do activations (but an expert's, whose fp8 weights meet fp8).
    """

    path: str
    served_names: tuple[str, ...] = ()
    dtype: Literal["auto"] | Dtype = "auto"
    max_model_len: int | None = None
    quantization: Quantization = "none"


class TopologySection(Section, frozen=True, kw_only=True):
    """How many nodes of each role make up the engine (M attention, N expert)."""

    attention_nodes: int = 1
    expert_nodes: int = 1


class SchedulerSection(Section, frozen=True, kw_only=True):
    """Limits of the batch and of the queue. Token budgets are per attention node and step.

    None: what suits the attention nodes' device (BatchLimits).
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    micro_batches: int | None = None
    prefix_caching: bool = True
    max_queued_requests: int = 1024
    max_preemptions: int = 4

    def batch_limits(self, *, is_gpu: bool) -> BatchLimits:
        """Return the limits of the batch, those that were not set by the device."""
        default = GPU_BATCH if is_gpu else CPU_BATCH
        return BatchLimits(
            default.max_num_seqs if self.max_num_seqs is None else self.max_num_seqs,
            default.max_num_batched_tokens
            if self.max_num_batched_tokens is None
            else self.max_num_batched_tokens,
        )


class CacheSection(Section, frozen=True, kw_only=True):
    """The paged KV cache of each attention node.

    `kv_cache_bytes` None: 256 MiB on the CPU; on a GPU what `gpu_memory_utilization` of its
    memory leaves beside weights and the buffers of the largest step, which the node measures.
    """

    block_size: int = 16
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9


class M2NSection(Section, frozen=True, kw_only=True):
    """The data plane between attention and expert nodes.

    `payload`: how hidden rows travel; auto is the model's dtype, fp8 and int8 compress the
    way out (with a scale per row) and answer in bf16. `wait`: how a node waits within a
    step; auto spins on cores of its own and blocks on shared ones, idle nodes always block.
    `window_rows` None: 512 rows at a time, 2048 over cuda_ipc, whose nodes read all weights for
    each. `deadline_s` limits one wait for a peer, not the step: a long step that gets on is fine.
    """

    transport: Literal["auto"] | Transport = "auto"
    payload: Payload = "auto"
    wait: Literal["auto", "block", "spin"] = "auto"
    window_rows: int | None = None
    link_latency_us: float = 0.0
    link_gbps: float | None = None
    deadline_s: float = 30.0

    @property
    def rows_per_window(self) -> int:
        """Return the rows of a window: those asked for, else what suits the transport."""
        if self.window_rows is not None:
            return self.window_rows
        return GPU_WINDOW_ROWS if self.transport == "cuda_ipc" else WINDOW_ROWS


class ComputeSection(Section, frozen=True, kw_only=True):
    """How a node computes. `num_threads` None: all cores that the process may use.

    `deterministic`: a request's logits have the same bits on any layout, in any batch, after
    any replay; resolve() chooses the kernels that can promise it. `layout`: whether nodes of
    one host take turns on all cores or have cores of their own (topspin.cores); auto is
    replaced before resolve(), by topspin.launch.calibrate, which chooses `spin_count` as well: how
    often an idle OpenMP thread looks for work before it sleeps (None: topspin.cores' count).

    `attention_device`, `expert_device`: "cpu", "cuda" or "cuda:N"; a node receives its own
    (topspin.devices). `kernels` "auto": triton on a GPU, else cpu; `expert_kernels` None: as
    `kernels`. `cuda_graphs`: a decode step of a GPU is captured once per size and then
    replayed. `gpu_streams` 2: attention and experts of one GPU overlap, on a stream each.
    """

    kernels: str = "auto"
    expert_kernels: str | None = None
    attention_device: str = "cpu"
    expert_device: str = "cpu"
    cuda_graphs: bool = True
    gpu_streams: int = 1
    num_threads: int | None = None
    deterministic: bool = False
    layout: Literal["auto", "shared", "split"] = "shared"
    spin_count: int | None = None

    def kernels_on(self, device: str) -> str:
        """Return the name by which kernels.dispatch knows the kernels of a node on `device`."""
        if self.kernels != "auto":
            return self.kernels
        return "cpu" if device == CPU else "triton"

    def place(self, role: NodeRole) -> Place:
        """Return where the nodes of `role` compute; Place.is_device chooses their code paths."""
        device = self.attention_device if role == "attention" else self.expert_device
        if role == "expert" and self.expert_kernels is not None:
            return Place(device, self.expert_kernels)
        return Place(device, self.kernels_on(device))

    def nodes(self, topology: TopologySection) -> Nodes:
        """Return how many nodes of each role there are and where they compute."""
        return Nodes(
            topology.attention_nodes,
            topology.expert_nodes,
            self.place("attention"),
            self.place("expert"),
        )


class BalanceSection(Section, frozen=True, kw_only=True):
    """Where routed experts are kept, and when that is thought over.

    `redundant_experts` slots per MoE layer, over all expert nodes, hold second copies.
    Every `interval_s` (0: never) the table is thought over, if there are several expert
    nodes. A new one must lower their max/mean by more than `min_gain` (0.05 is 5 %). Loads
    are averaged with a half-life of `half_life_pairs` routed pairs per layer and expert.
    """

    redundant_experts: int = 0
    interval_s: float = 60.0
    min_gain: float = 0.05
    half_life_pairs: int = 512


class TraceSection(Section, frozen=True, kw_only=True):
    """The flight recorder of every node: on or off, and how many stamps it keeps."""

    enabled: bool = True
    num_stamps: int = 2**17


class FailoverSection(Section, frozen=True, kw_only=True):
    """What happens when a node is lost. `restart` False: the engine ends.

    Otherwise nodes are restarted; requests wait up to `restart_deadline_s` for an engine that
    can serve them. A node that has not reacted `halt_deadline_s` after it was told to give up
    a step is dead. So is, with or without restarts, one that is connected and says nothing
    for `progress_deadline_s` while a step waits for it: no layer may take that long.
    """

    restart: bool = False
    restart_deadline_s: float = 30.0
    halt_deadline_s: float = 10.0
    progress_deadline_s: float = 20.0


class GatewaySection(Section, frozen=True, kw_only=True):
    """The HTTP side.

    `generation_config`: where the defaults of sampling parameters come from: "auto" is the
    checkpoint's generation_config.json, "none" is OpenAI's, else a directory with that file.
    `allowed_origins`: of the web pages that browsers let call the server; `*` is any.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    generation_config: str = "auto"
    allowed_origins: tuple[str, ...] = ()


class NodeConfig(Section, frozen=True, kw_only=True):
    """What an attention or expert node needs to know; sent in Welcome.

    `micro_batches`: how many every step has; None: it differs.
    """

    model: ModelSection
    topology: TopologySection
    cache: CacheSection
    m2n: M2NSection
    compute: ComputeSection
    max_num_seqs: int
    max_num_batched_tokens: int
    micro_batches: int | None = None
    restart: bool = False
    trace: TraceSection = TraceSection()


class EngineConfig(Section, frozen=True, kw_only=True):
    """All settings of one engine."""

    model: ModelSection
    topology: TopologySection = TopologySection()
    scheduler: SchedulerSection = SchedulerSection()
    cache: CacheSection = CacheSection()
    m2n: M2NSection = M2NSection()
    compute: ComputeSection = ComputeSection()
    balance: BalanceSection = BalanceSection()
    trace: TraceSection = TraceSection()
    gateway: GatewaySection = GatewaySection()
    failover: FailoverSection = FailoverSection()

    @property
    def batch(self) -> BatchLimits:
        """Return the limits of an attention node's batch."""
        return self.scheduler.batch_limits(is_gpu=self.compute.place("attention").is_gpu)

    @property
    def nodes(self) -> Nodes:
        """Return how many nodes of each role there are and where they compute."""
        return self.compute.nodes(self.topology)

    def for_node(self, role: NodeRole = "attention", index: int = 0) -> NodeConfig:
        """Return the part that node `index` of `role` receives, with its own device."""
        devices = assign_devices(self.nodes, transport=self.m2n.transport)
        if role == "attention":
            own = {"attention_device": devices.attention[index]}
        else:
            kernels = self.compute.expert_kernels or self.compute.kernels
            own = {"expert_device": devices.experts[index], "kernels": kernels}
        compute = msgspec.structs.replace(self.compute, **own)
        return NodeConfig(
            model=self.model,
            topology=self.topology,
            cache=self.cache,
            m2n=self.m2n,
            compute=compute,
            max_num_seqs=self.batch.max_num_seqs,
            max_num_batched_tokens=self.batch.max_num_batched_tokens,
            micro_batches=self.scheduler.micro_batches,
            restart=self.failover.restart,
            trace=self.trace,
        )

    @property
    def max_model_len(self) -> int:
        """Return the longest sequence, prompt and output together, in tokens."""
        assert self.model.max_model_len is not None, "resolve() first"
        return self.model.max_model_len


def load_config(path: str) -> EngineConfig:
    """Read an EngineConfig from the JSON file at `path` (any readable path, `/dev/fd/N` too)."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=EngineConfig)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
