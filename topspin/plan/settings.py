"""The settings that a user asks for, in frozen sections, and the policies of an engine plan.

Owns every setting: its field is the one place that gives its type, default, range, help and flag.
Knows no tensors and no sockets. app.cli.flags derives the command line from these sections;
topspin.plan.from_flags makes the engine plan of them, which is all that later code sees.

None stands for "auto" in a field that is not text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from topspin.cores import DEFAULT_LAYOUT, SPIN_COUNT, Layout
from topspin.devices import CPU, KernelName, NodeRole, Nodes, Place
from topspin.logs import FORMAT_VARIABLE, LogFormat
from topspin.plan.precision import Format
from topspin.plan.retrieval import MIN_TOKENS, SpillSpec, parse_spill
from topspin.plan.setting import Setting
from topspin.plan.speculation import Speculation, parse_speculation
from topspin.units import format_size, parse_object, parse_origins, parse_size, parse_switch

API_KEY_VARIABLE = "TOPSPIN_API_KEY"
"""The variable with the one API key of a server, and of the commands that are its clients."""

DETERMINISTIC_KERNELS = "deterministic"
CPU_KV_CACHE_BYTES = 256 * 2**20
WINDOW_ROWS = 512
GPU_WINDOW_ROWS = 2048
MAX_MICRO_BATCHES = 4

Transport = Literal["local", "shm", "tcp", "nixl", "cuda_ipc"]
Dtype = Literal["float32", "bfloat16"]
KvDtype = Literal["auto", "fp8", "fp8_e4m3"]
Payload = Literal["auto", "bf16", "fp32", "fp8", "int8"]
Kernels = Literal["auto"] | KernelName


class BatchLimits(NamedTuple):
    """The maximum of running sequences and of tokens per step, per attention node."""

    max_num_seqs: int
    max_num_batched_tokens: int


CPU_BATCH = BatchLimits(64, 512)
# A few hundred rows leave a GPU far below its arithmetic limit; prompts should fill it.
GPU_BATCH = BatchLimits(256, 8192)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of settings that one part of the system reads."""


class ModelSection(Section, frozen=True, kw_only=True):
    """The model: a checkpoint directory, and how it is read.

    With a format for `quantization` the routed experts, shared experts, dense MLPs and attention
    projections are kept at that precision and the LM head in 8 bits, quantised while they are read;
    by default a quantised checkpoint's are as it has them. Embeddings, routers and norms stay in
    `dtype`, as do activations (except an expert's with fp8 weights, which are fp8 too).
    """

    path: str
    dtype: Annotated[
        Literal["auto"] | Dtype,
        Setting("type of weights and activations; auto: the checkpoint's", flag="--dtype"),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Setting(
            "longest sequence, prompt and output together; auto: the model's own limit",
            flag="--max-model-len TOKENS",
            within=(1, 2**24),
        ),
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | None,
        Setting(
            "fields that replace those of the model's config.json, as JSON, to extend its limit: "
            "max_position_embeddings, rope_theta and rope_scaling",
            flag="--hf-overrides JSON",
            parse=parse_object,
            none="none",
        ),
    ] = None
    quantization: Annotated[
        Literal["auto"] | Format,
        Setting(
            "keep experts, MLPs and attention projections in 8 or 4 bits, quantised while they "
            "are read: faster and smaller, with some loss of quality (`topspin bench "
            "quantization MODEL` measures it); auto: as the checkpoint has them",
            flag="--quantization",
        ),
    ] = "auto"


class TopologySection(Section, frozen=True, kw_only=True):
    """The number of nodes of each role (M attention, N expert, D draft)."""

    attention_nodes: Annotated[
        int,
        Setting(
            "attention nodes, each a replica with its own KV cache",
            flag="--attention-nodes M",
            within=(1, 1024),
        ),
    ] = 1
    expert_nodes: Annotated[
        int,
        Setting(
            "expert nodes, which share the routed experts",
            flag="--expert-nodes N",
            within=(1, 1024),
        ),
    ] = 1
    draft_nodes: Annotated[
        int,
        Setting(
            "draft nodes, which compute the draft model of --speculative-config while attention "
            "nodes verify; 0: it computes on the attention nodes, in turns with them",
            flag="--draft-nodes D",
            within=(0, 1024),
        ),
    ] = 0


class SchedulingPolicy(Section, frozen=True, kw_only=True):
    """How steps are planned, and how many requests may wait.

    `micro_batches` None: measured while serving.
    """

    micro_batches: Annotated[
        int | None,
        Setting(
            "micro-batches in flight; auto: measured while serving",
            flag="--micro-batches M",
            within=(1, MAX_MICRO_BATCHES),
        ),
    ] = None
    prefix_caching: Annotated[
        bool, Setting("reuse cached prompt prefixes", flag="--enable-prefix-caching")
    ] = True
    max_queued_requests: Annotated[
        int,
        Setting(
            "waiting requests beyond which new ones get 429",
            flag="--max-queued-requests N",
            within=(0, 2**20),
        ),
    ] = 1024
    max_preemptions: Annotated[
        int,
        Setting(
            "a request that lost its cache blocks so often is admitted again only where it "
            "cannot lose them once more",
            within=(0, 2**20),
        ),
    ] = 4


class SchedulerSection(SchedulingPolicy, frozen=True, kw_only=True):
    """Limits of the batch and of the queue. Token budgets are per attention node and step."""

    max_num_seqs: Annotated[
        int | None,
        Setting(
            "sequences that run at once on an attention node; auto: "
            f"{CPU_BATCH.max_num_seqs} on the CPU, {GPU_BATCH.max_num_seqs} on a GPU",
            flag="--max-num-seqs N",
            within=(1, 65536),
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Setting(
            "tokens per step and attention node; longer prompts go in chunks; auto: "
            f"{CPU_BATCH.max_num_batched_tokens} on the CPU, "
            f"{GPU_BATCH.max_num_batched_tokens} on a GPU",
            flag="--max-num-batched-tokens N",
            within=(1, 2**20),
        ),
    ] = None

    def batch_limits(self, *, is_gpu: bool) -> BatchLimits:
        """Return the limits of the batch; those not set depend on the device."""
        default = GPU_BATCH if is_gpu else CPU_BATCH
        return BatchLimits(
            default.max_num_seqs if self.max_num_seqs is None else self.max_num_seqs,
            default.max_num_batched_tokens
            if self.max_num_batched_tokens is None
            else self.max_num_batched_tokens,
        )


class CacheSection(Section, frozen=True, kw_only=True):
    """The paged KV cache of each attention node.

    `kv_cache_bytes` None on a GPU: `gpu_memory_utilization` of its memory minus the weights and
    the buffers of the largest step, which the node measures.
    """

    block_size: Annotated[
        int,
        Setting("tokens per block of the KV cache; only in an engine plan", within=(1, 1024)),
    ] = 16
    kv_cache_bytes: Annotated[
        int | None,
        Setting(
            "KV cache of each attention node, its codes for retrieval included, for example 2GiB; "
            "auto: "
            f"{format_size(CPU_KV_CACHE_BYTES)} on the CPU, what fits on a GPU",
            flag="--kv-cache-memory SIZE",
            within=(1, 2**50),
            parse=parse_size,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KvDtype,
        Setting(
            "type of cached keys and values; auto: the model's; fp8, which is fp8_e4m3: half the "
            "memory of bf16, with some loss of quality; only on the CPU",
            flag="--kv-cache-dtype",
        ),
    ] = "auto"
    kv_retrieval_tokens: Annotated[
        int | None,
        Setting(
            "keys that a decoded token attends to in a longer context, found by product-quantised "
            "codes; auto: all",
            flag="--kv-retrieval-tokens TOKENS",
            within=(MIN_TOKENS, 2**24),
        ),
    ] = None
    kv_spill: Annotated[
        SpillSpec | None,
        Setting(
            "directory and size of an unlinked file for all keys and values of an attention node, "
            "--kv-cache-memory of which are in memory, for example /var/tmp:8GiB; host:8GiB beside "
            "a GPU: memory of the host; needs --kv-retrieval-tokens; auto: none",
            flag="--kv-spill-dir DIR:SIZE",
            parse=parse_spill,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Setting(
            "share of a GPU's memory that a node may fill with weights, buffers and KV cache",
            flag="--gpu-memory-utilization SHARE",
            above=0,
            within=(None, 1),
        ),
    ] = 0.9


class SpeculationSection(Section, frozen=True, kw_only=True):
    """Speculative decoding: the attention nodes guess tokens and check several in one step."""

    config: Annotated[
        Speculation | None,
        Setting(
            "guess tokens by what was written before or with a draft model, as JSON with vLLM's "
            "keys, for example "
            '{"method": "suffix", "num_speculative_tokens": 7}; output is the same',
            flag="--speculative-config JSON",
            parse=parse_speculation,
            none="off",
        ),
    ] = None


class M2NSection(Section, frozen=True, kw_only=True):
    """The data plane between attention and expert nodes.

    `payload` fp8 and int8 compress requests (with a scale per row); answers are bf16. Idle nodes
    always block, regardless of `wait`. `window_rows` is larger over cuda_ipc, where an expert node
    reads all weights for each window. `deadline_s` limits one wait for a peer, not the step.
    """

    transport: Annotated[
        Literal["auto"] | Transport,
        Setting(
            "between attention and expert nodes; local: all nodes in one process; cuda_ipc: "
            "GPUs of one host; nixl needs pip install -e '.[rdma]'; auto: local on one GPU, "
            "cuda_ipc between several, else shm, unless --layout auto finds one process faster",
            flag="--transport",
        ),
    ] = "auto"
    payload: Annotated[
        Payload,
        Setting(
            "how rows travel between nodes; auto: in the model's dtype; fp8, int8: compressed "
            "to the experts, bf16 back",
            flag="--m2n-payload",
        ),
    ] = "auto"
    wait: Annotated[
        Literal["auto", "block", "spin"],
        Setting("how a node waits within a step; auto: spin on cores of its own, else block"),
    ] = "auto"
    window_rows: Annotated[
        int | None,
        # A GPU's kernels have one program per row, and this is the most.
        Setting(
            "token rows of a transport window; larger micro-batches go in several; auto: "
            f"{WINDOW_ROWS}, over cuda_ipc {GPU_WINDOW_ROWS}",
            within=(1, 2**16 - 1),
        ),
    ] = None
    link_latency_us: Annotated[
        float, Setting("emulate a link with this one-way latency in microseconds", within=(0, None))
    ] = 0.0
    link_gbps: Annotated[
        float | None,
        Setting("emulate a link of this bandwidth in Gbit/s; auto: unlimited", above=0),
    ] = None
    deadline_s: Annotated[
        float,
        Setting("a step in which a node waits longer than this for another has failed", above=0),
    ] = 30.0


class ExecutionPolicy(Section, frozen=True, kw_only=True):
    """How all nodes compute.

    `deterministic`: a request's logits have the same bits on any layout, in any batch, after any
    replay, with the kernels of that name. A node's decode step is recorded once per size and
    replayed with `recordings`: a CUDA graph on a GPU, a program of compiled calls on a CPU.
    """

    deterministic: Annotated[
        bool,
        Setting(
            "the same bits of logits on any layout and in any batch; slower", flag="--deterministic"
        ),
    ] = False
    recordings: Annotated[
        bool,
        Setting(
            "launch every kernel by itself instead of replaying recorded steps",
            flag="--enforce-eager",
            constant=False,
        ),
    ] = True
    gpu_streams: Annotated[
        int,
        Setting(
            "2: attention and experts that share one GPU overlap, on a stream each and with two "
            "micro-batches unless told otherwise",
            within=(1, 2),
        ),
    ] = 1
    spin_count: Annotated[
        int,
        Setting(
            "how often an idle OpenMP thread looks for work before it sleeps", within=(0, 2**31 - 1)
        ),
    ] = SPIN_COUNT


class ComputeSection(ExecutionPolicy, frozen=True, kw_only=True):
    """Where nodes compute, and with which threads; `layout`: topspin.cores."""

    kernels: Annotated[
        Kernels,
        Setting(
            "implementation of the operations: cpu, triton, reference (slow and plain) or auto: "
            "triton on a GPU, else cpu"
        ),
    ] = "auto"
    expert_kernels: Annotated[Kernels | None, Setting("the expert nodes'; auto: as kernels")] = None
    attention_device: Annotated[
        str,
        Setting(
            "where attention nodes compute: cpu, cuda:N, or cuda, which gives each a GPU of its "
            "own",
            flag="--attention-device DEVICE",
        ),
    ] = CPU
    expert_device: Annotated[
        str,
        Setting(
            "where expert nodes compute: cpu, cuda:N, or cuda: with --transport local (auto: one "
            "attention node on cuda) the same GPU, else one each of their own",
            flag="--expert-device DEVICE",
        ),
    ] = CPU
    num_threads: Annotated[
        int | None,
        Setting(
            "threads of each node; auto: all cores that its process may use",
            flag="--num-threads N",
            within=(1, 4096),
        ),
    ] = None
    layout: Annotated[
        Literal["auto"] | Layout,
        Setting(
            "nodes of this host take turns on all cores, or have cores of their own; auto: "
            f"measured at the first start and remembered ({DEFAULT_LAYOUT} where it cannot be)",
            flag="--layout",
        ),
    ] = "auto"

    def place(self, role: NodeRole) -> Place:
        """Return where the nodes of `role` compute; Place.is_device chooses their code paths."""
        if role == "attention":
            return Place(self.attention_device, _kernels_on(self.attention_device, self.kernels))
        kernels = self.expert_kernels or self.kernels
        return Place(self.expert_device, _kernels_on(self.expert_device, kernels))

    def nodes(self, topology: TopologySection) -> Nodes:
        """Return how many nodes of each role there are and where they compute."""
        return Nodes(
            topology.attention_nodes,
            topology.expert_nodes,
            self.place("attention"),
            self.place("expert"),
        )


def _kernels_on(device: str, asked: Kernels) -> KernelName:
    """Return kernels.dispatch's name of the kernels `asked` for on `device`."""
    if asked != "auto":
        return asked
    return "cpu" if device == CPU else "triton"


class BalancePolicy(Section, frozen=True, kw_only=True):
    """When the placement of routed experts on nodes changes."""

    interval_s: Annotated[
        float,
        Setting(
            "how often several expert nodes' share of the experts is planned; 0: never",
            within=(0, None),
        ),
    ] = 60.0
    min_gain: Annotated[
        float,
        Setting(
            "by how much a new plan must lower max/mean of the nodes' load; 0.05: 5 %",
            within=(0, None),
        ),
    ] = 0.05
    half_life_pairs: Annotated[
        int,
        Setting(
            "half-life of averaged loads, in routed pairs per layer and expert", within=(1, 2**30)
        ),
    ] = 512


class BalanceSection(BalancePolicy, frozen=True, kw_only=True):
    """The placement of routed experts on nodes, and when it changes."""

    redundant_experts: Annotated[
        int,
        Setting(
            "slots per MoE layer, over all expert nodes, for second copies",
            flag="--redundant-experts R",
            within=(0, 2**20),
        ),
    ] = 0


class TraceSection(Section, frozen=True, kw_only=True):
    """The flight recorder of every node, which `topspin trace` reads."""

    enabled: Annotated[bool, Setting("record every hop")] = True
    num_stamps: Annotated[
        int, Setting("stamps that each node keeps, of 24 bytes", within=(1, 2**21))
    ] = 2**17


Restart = Annotated[
    bool,
    Setting(
        "when a node is lost: restart it and replay its requests, or end the engine",
        flag="--restart on|off",
        parse=parse_switch,
    ),
]


class FailoverPolicy(Section, frozen=True, kw_only=True):
    """The reaction to the loss of a node.

    `progress_deadline_s` bounds one layer and holds without restarts too.
    """

    restart: Restart = False
    restart_deadline_s: Annotated[
        float,
        Setting(
            "how long requests wait for a lost node or scheduler before they get 503",
            flag="--restart-deadline SECONDS",
            above=0,
        ),
    ] = 30.0
    halt_deadline_s: Annotated[
        float,
        Setting(
            "a node that takes longer to give up a failed step is dead, and one that got SIGTERM "
            "ends at the latest then",
            above=0,
        ),
    ] = 10.0
    progress_deadline_s: Annotated[
        float,
        # Nodes report twice a second (topspin.processes.progress.INTERVAL_S).
        Setting(
            "a connected node that is silent for longer while a step waits for it is dead",
            within=(2.0, None),
        ),
    ] = 20.0


class FailoverSection(FailoverPolicy, frozen=True, kw_only=True):
    """The reaction to the loss of a node; an engine of flags stays up, a plan says what it does."""

    restart: Restart = True


class GatewaySection(Section, frozen=True, kw_only=True):
    """The HTTP side.

    `generation_config`: the source of the defaults of sampling parameters: "auto" is the
    checkpoint's generation_config.json, "none" is OpenAI's, else a directory with that file.
    `allowed_origins`: the origins of web pages that may call the server from a browser; `*` is any.
    `log_format` is that of all processes.
    """

    served_names: Annotated[
        tuple[str, ...],
        Setting(
            "names by which clients ask for the model; the first one is shown; none: MODEL",
            flag="--served-model-name NAME",
        ),
    ] = ()
    host: Annotated[str, Setting("address to listen on", flag="--host")] = "127.0.0.1"
    port: Annotated[
        int, Setting("TCP port; 0 takes a free one", flag="--port", within=(0, 65535))
    ] = 8000
    api_key_file: Annotated[
        str | None,
        Setting(
            "file with the API keys that requests must bring one of, TENANT: KEY a line, read "
            "again when it changes; for a single key set $TOPSPIN_API_KEY or --api-key; none",
            flag="--api-key-file FILE",
            none="none",
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Setting("PEM file with the key of --ssl-certfile", flag="--ssl-keyfile FILE", none="none"),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        Setting(
            "PEM file with the certificates of this server, which then speaks TLS; none",
            flag="--ssl-certfile FILE",
            none="none",
        ),
    ] = None
    generation_config: Annotated[
        str,
        Setting(
            "whose generation_config.json gives the defaults of sampling parameters: auto: the "
            "checkpoint's, none: nobody's, else that of a directory",
            flag="--generation-config auto|none|DIR",
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None,
        Setting(
            "a Jinja file in place of the checkpoint's chat template",
            flag="--chat-template FILE",
        ),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool,
        Setting(
            "whether the model may decide to call a tool that a request offers",
            flag="--enable-auto-tool-choice",
        ),
    ] = True
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "mistral", "llama3_json"],
        Setting(
            "the format in which the model calls tools; auto: that of its chat template",
            flag="--tool-call-parser",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek_r1", "qwen3"],
        Setting(
            "the format in which the model marks its reasoning (both names: <think>); auto: that "
            "of its chat template",
            flag="--reasoning-parser",
        ),
    ] = "auto"
    allowed_origins: Annotated[
        tuple[str, ...],
        Setting(
            "web pages that browsers let call the server (CORS), as JSON or with commas: "
            "http://localhost:3000,https://ui.example.com, or * for all; none",
            flag="--allowed-origins LIST",
            parse=parse_origins,
        ),
    ] = ()
    access_log: Annotated[
        bool,
        Setting("log each request at its end, but for /health and /metrics", flag="--access-log"),
    ] = True
    log_format: Annotated[
        LogFormat | None,
        Setting(
            "the logs of all processes: a line of text, or a JSON object, per record; auto: "
            f"${FORMAT_VARIABLE}, or text",
            flag="--log-format",
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        Setting(
            "OpenTelemetry collector that gets a trace of each request, by OTLP over HTTP: "
            "http://localhost:4318/v1/traces; OTEL_... variables hold; none",
            flag="--otlp-traces-endpoint URL",
            none="none",
        ),
    ] = None
    sse_keep_alive_interval_s: Annotated[
        float,
        Setting(
            "a stream that has sent nothing for so long sends a comment, so that clients and "
            "proxies wait on; 0: none",
            flag="--sse-keep-alive-interval SECONDS",
            within=(0, 3600),
        ),
    ] = 15.0
    shutdown_timeout_s: Annotated[
        float,
        Setting(
            "at SIGTERM requests in flight get this long to end; new ones are refused",
            flag="--shutdown-timeout SECONDS",
            within=(0, 3600),
        ),
    ] = 1.0


class EngineConfig(Section, frozen=True, kw_only=True):
    """All that a user can ask for by flags; topspin.plan.from_flags turns it into an EnginePlan."""

    model: ModelSection
    topology: TopologySection = TopologySection()
    scheduler: SchedulerSection = SchedulerSection()
    cache: CacheSection = CacheSection()
    speculation: SpeculationSection = SpeculationSection()
    m2n: M2NSection = M2NSection()
    compute: ComputeSection = ComputeSection()
    balance: BalanceSection = BalanceSection()
    trace: TraceSection = TraceSection()
    gateway: GatewaySection = GatewaySection()
    failover: FailoverSection = FailoverSection()
