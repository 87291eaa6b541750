"""The flags of `topspin serve`.

Owns their names (vLLM's where the meaning is the same), their types and their help, and
nothing of their defaults, which are those of topspin.config's sections. topspin.cli adds
them to its parser; topspin.cli.serve turns them into a configuration.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Literal, get_args

from models.hub import DEFAULT_MODEL
from topspin.config import (
    CPU_BATCH,
    CPU_KV_CACHE_BYTES,
    GPU_BATCH,
    GPU_WINDOW_ROWS,
    WINDOW_ROWS,
    BalanceSection,
    CacheSection,
    ComputeSection,
    FailoverSection,
    GatewaySection,
    M2NSection,
    ModelSection,
    Payload,
    Quantization,
    SchedulerSection,
    TopologySection,
    TraceSection,
    Transport,
)
from topspin.cores import SPIN_COUNT
from topspin.limits import MAX_MICRO_BATCHES
from topspin.units import format_size

# What kernels.dispatch.select_ops knows; the command line does not import torch to ask.
KERNELS = ("auto", "cpu", "reference", "triton")

# Lower case, as a browser sends it: the comparison is literal.
_ORIGIN = re.compile(
    r"\*|[a-z][a-z0-9+.-]*://[a-z0-9._-]+(:[0-9]+)?|https?://\[[0-9a-f:]+\](:[0-9]+)?"
)


class ServeArguments(argparse.Namespace):
    """The parsed flags of `topspin serve`."""

    model: str
    host: str
    port: int
    allowed_origins: tuple[str, ...]
    served_model_name: list[str]
    generation_config: str
    dtype: Literal["auto", "float32", "bfloat16"]
    max_model_len: int | None
    quantization: Quantization
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_queued_requests: int
    max_preemptions: int
    enable_prefix_caching: bool
    micro_batches: str
    block_size: int
    kv_cache_memory: str | None
    attention_nodes: int
    expert_nodes: int
    transport: Literal["auto"] | Transport
    m2n_payload: Payload
    m2n_window_rows: int | None
    link_latency_us: float
    link_gbps: float | None
    step_deadline: float
    restart: Literal["on", "off"]
    restart_deadline: float
    halt_deadline: float
    progress_deadline: float
    num_threads: int | None
    omp_spin_count: int | None
    layout: Literal["auto", "shared", "split"]
    m2n_wait: Literal["auto", "block", "spin"]
    kernels: str
    attention_device: str
    expert_device: str
    gpu_memory_utilization: float | None
    enforce_eager: bool
    gpu_streams: int
    deterministic: bool
    trace: bool
    trace_stamps: int
    redundant_experts: int
    expert_balance_interval: float
    expert_balance_min_gain: float
    expert_load_half_life: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `topspin serve` to `parser`."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a checkpoint directory, a model id of the Hugging Face hub, or (the default) "
        f"{DEFAULT_MODEL}, which `topspin pull` makes",
    )
    _add_http_arguments(parser.add_argument_group("HTTP"))
    _add_model_arguments(parser.add_argument_group("model"))
    _add_device_arguments(parser.add_argument_group("devices"))
    _add_scheduler_arguments(parser.add_argument_group("batching and cache"))
    nodes = parser.add_argument_group("nodes and the net between them")
    _add_topology_arguments(nodes)
    _add_net_arguments(nodes)
    _add_trace_arguments(nodes)
    _add_failover_arguments(parser.add_argument_group("failures"))
    _add_balance_arguments(parser.add_argument_group("balance of the expert nodes"))


def _add_http_arguments(group: argparse._ArgumentGroup) -> None:
    gateway = GatewaySection()
    group.add_argument("--host", default=gateway.host, help="address to listen on (%(default)s)")
    group.add_argument(
        "--port", type=int, default=gateway.port, help="TCP port; 0 takes a free one (%(default)s)"
    )
    group.add_argument(
        "--allowed-origins",
        type=_origins,
        default=gateway.allowed_origins,
        metavar="LIST",
        help="web pages that browsers let call the server (CORS), as JSON or with commas: "
        "http://localhost:3000,https://ui.example.com, or * for all (none)",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names by which clients ask for the model; the first one is shown (MODEL)",
    )
    group.add_argument(
        "--generation-config",
        default=gateway.generation_config,
        metavar="auto|none|DIR",
        help="whose generation_config.json gives the defaults of sampling parameters: the "
        "checkpoint's, nobody's, or that of a directory (%(default)s)",
    )


def _origins(text: str) -> tuple[str, ...]:
    """Return the origins in a JSON list or a list with commas, as browsers write them."""
    try:
        listed = json.loads(text) if text.startswith("[") else text.split(",")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list: {error}") from None
    origins = tuple(str(origin).strip() for origin in listed)
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise argparse.ArgumentTypeError(
                f"{origin!r} is not an origin such as https://ui.example.com (nothing follows the "
                "host and port), nor *"
            )
    return origins


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    model, compute = ModelSection(path=""), ComputeSection()
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default=model.dtype,
        help="type of weights and activations; auto: the checkpoint's (%(default)s)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        default=model.max_model_len,
        metavar="TOKENS",
        help="longest sequence, prompt and output together (the model's own limit)",
    )
    group.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        default=model.quantization,
        help="keep experts, MLPs and attention projections in 8 or 4 bits, quantised as they are "
        "read; faster and smaller, at some loss of quality (%(default)s)",
    )
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default=compute.kernels,
        help="implementation of the operations: auto is triton on a GPU and cpu elsewhere; "
        "reference is slow and plain (%(default)s)",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        default=compute.deterministic,
        help="the same bits of logits on any layout and in any batch; slower",
    )
    group.add_argument(
        "--num-threads",
        type=int,
        default=compute.num_threads,
        metavar="N",
        help="threads of each node (all cores that the process may use)",
    )
    group.add_argument(
        "--omp-spin-count",
        type=int,
        default=compute.spin_count,
        metavar="N",
        help="looks for work of an idle OpenMP thread before it sleeps "
        f"({SPIN_COUNT}; --layout auto measures it)",
    )


def _add_device_arguments(group: argparse._ArgumentGroup) -> None:
    compute, cache = ComputeSection(), CacheSection()
    group.add_argument(
        "--attention-device",
        default=compute.attention_device,
        metavar="DEVICE",
        help="where attention nodes compute: cpu, cuda:N, or cuda, which gives each a GPU of its "
        "own (%(default)s)",
    )
    group.add_argument(
        "--expert-device",
        default=compute.expert_device,
        metavar="DEVICE",
        help="where expert nodes compute: cpu, cuda:N, or cuda: with --transport local (auto: one "
        "attention node on cuda) the same GPU, else one each of their own (%(default)s)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=None,
        metavar="SHARE",
        help="share of a GPU's memory that a node may fill with weights, buffers and the KV "
        f"cache ({cache.gpu_memory_utilization})",
    )
    group.add_argument(
        "--enforce-eager",
        action="store_true",
        default=not compute.cuda_graphs,
        help="launch every kernel by itself instead of replaying CUDA graphs",
    )
    group.add_argument(
        "--gpu-streams",
        type=int,
        default=compute.gpu_streams,
        metavar="N",
        help="2: attention and experts that share one GPU overlap, on a stream each and with two "
        "micro-batches unless told otherwise (%(default)s)",
    )


def _add_scheduler_arguments(group: argparse._ArgumentGroup) -> None:
    scheduler, cache = SchedulerSection(), CacheSection()
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=scheduler.max_num_seqs,
        metavar="N",
        help="sequences that run at once on an attention node "
        f"({CPU_BATCH.max_num_seqs} on the CPU, {GPU_BATCH.max_num_seqs} on a GPU)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=scheduler.max_num_batched_tokens,
        metavar="N",
        help="tokens per step and attention node; longer prompts go in chunks "
        f"({CPU_BATCH.max_num_batched_tokens} on the CPU, "
        f"{GPU_BATCH.max_num_batched_tokens} on a GPU)",
    )
    group.add_argument(
        "--max-queued-requests",
        type=int,
        default=scheduler.max_queued_requests,
        metavar="N",
        help="waiting requests beyond which new ones get 503 (%(default)s)",
    )
    group.add_argument(
        "--max-preemptions",
        type=int,
        default=scheduler.max_preemptions,
        metavar="N",
        help="a request that lost its cache this often comes back only where it is safe from "
        "that (%(default)s)",
    )
    group.add_argument(
        "--micro-batches",
        default="auto" if scheduler.micro_batches is None else str(scheduler.micro_batches),
        metavar="M",
        help=f"micro-batches in flight: auto or 1 to {MAX_MICRO_BATCHES} (%(default)s)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=scheduler.prefix_caching,
        help="reuse cached prompt prefixes",
    )
    group.add_argument(
        "--block-size",
        type=int,
        default=cache.block_size,
        metavar="TOKENS",
        help="tokens per block of the KV cache (%(default)s)",
    )
    group.add_argument(
        "--kv-cache-memory",
        default=cache.kv_cache_bytes,
        metavar="SIZE",
        help="KV cache of each attention node, for example 2GiB "
        f"({format_size(CPU_KV_CACHE_BYTES)} on the CPU; what fits on a GPU)",
    )


def _add_topology_arguments(group: argparse._ArgumentGroup) -> None:
    topology, m2n = TopologySection(), M2NSection()
    group.add_argument(
        "--attention-nodes",
        type=int,
        default=topology.attention_nodes,
        metavar="M",
        help="attention nodes, each a replica with its own KV cache (%(default)s)",
    )
    group.add_argument(
        "--expert-nodes",
        type=int,
        default=topology.expert_nodes,
        metavar="N",
        help="expert nodes, which share the routed experts (%(default)s)",
    )
    group.add_argument(
        "--transport",
        choices=("auto", *get_args(Transport)),
        default=m2n.transport,
        help="between attention and expert nodes; local: all nodes in one process; cuda_ipc: "
        "GPUs of one host; nixl needs pip install topspin[rdma]; auto: local on one GPU, "
        "cuda_ipc between several, else shm (%(default)s)",
    )
    group.add_argument(
        "--layout",
        choices=("auto", "shared", "split"),
        default=ComputeSection().layout,
        help="nodes of this host take turns on all cores, or have cores of their own; auto: "
        "measured for some seconds at the first start (%(default)s)",
    )


def _add_net_arguments(group: argparse._ArgumentGroup) -> None:
    m2n = M2NSection()
    group.add_argument(
        "--m2n-wait",
        choices=("auto", "block", "spin"),
        default=m2n.wait,
        help="how a node waits within a step; auto: spin on cores of its own (%(default)s)",
    )
    group.add_argument(
        "--m2n-payload",
        choices=get_args(Payload),
        default=m2n.payload,
        help="how rows travel between nodes; auto: as the model's dtype; fp8, int8: compressed "
        "on the way out, back as bf16 (%(default)s)",
    )
    group.add_argument(
        "--m2n-window-rows",
        type=int,
        default=m2n.window_rows,
        metavar="ROWS",
        help="token rows of a transport window; larger micro-batches go in parts "
        f"({WINDOW_ROWS}; cuda_ipc: {GPU_WINDOW_ROWS})",
    )
    group.add_argument(
        "--link-latency-us",
        type=float,
        default=m2n.link_latency_us,
        metavar="US",
        help="emulate a link with this one-way latency (%(default)s)",
    )
    group.add_argument(
        "--link-gbps",
        type=float,
        default=m2n.link_gbps,
        metavar="GBPS",
        help="emulate a link of this bandwidth in Gbit/s (unlimited)",
    )
    group.add_argument(
        "--step-deadline",
        type=float,
        default=m2n.deadline_s,
        metavar="SECONDS",
        help="a step in which a node waits longer than this for another has failed (%(default)s)",
    )


def _add_failover_arguments(group: argparse._ArgumentGroup) -> None:
    failover = FailoverSection()
    group.add_argument(
        "--restart",
        choices=("on", "off"),
        default="on" if failover.restart else "off",
        help="when an attention or expert node is lost: restart it and replay its requests, or "
        "end the engine (%(default)s)",
    )
    group.add_argument(
        "--restart-deadline",
        type=float,
        default=failover.restart_deadline_s,
        metavar="SECONDS",
        help="how long requests wait for a lost node before they get 503 (%(default)s)",
    )
    group.add_argument(
        "--halt-deadline",
        type=float,
        default=failover.halt_deadline_s,
        metavar="SECONDS",
        help="a node that takes longer to give up a failed step is taken for dead (%(default)s)",
    )
    group.add_argument(
        "--progress-deadline",
        type=float,
        default=failover.progress_deadline_s,
        metavar="SECONDS",
        help="a connected node that is silent for longer in a step is taken for dead (%(default)s)",
    )


def _add_trace_arguments(group: argparse._ArgumentGroup) -> None:
    trace = TraceSection()
    group.add_argument(
        "--trace",
        action=argparse.BooleanOptionalAction,
        default=trace.enabled,
        help="record every hop for `topspin trace`",
    )
    group.add_argument(
        "--trace-stamps",
        type=int,
        default=trace.num_stamps,
        metavar="N",
        help="how many stamps each node keeps, of 24 bytes (%(default)s)",
    )


def _add_balance_arguments(group: argparse._ArgumentGroup) -> None:
    balance = BalanceSection()
    group.add_argument(
        "--redundant-experts",
        type=int,
        default=balance.redundant_experts,
        metavar="R",
        help="slots per layer, over all expert nodes, for second copies (%(default)s)",
    )
    group.add_argument(
        "--expert-balance-interval",
        type=float,
        default=balance.interval_s,
        metavar="SECONDS",
        help="how often their share of the experts is thought over; 0: never (%(default)s)",
    )
    group.add_argument(
        "--expert-balance-min-gain",
        type=float,
        default=balance.min_gain,
        metavar="SHARE",
        help="how much lower max/mean of the nodes' load a new placement must be (%(default)s)",
    )
    group.add_argument(
        "--expert-load-half-life",
        type=int,
        default=balance.half_life_pairs,
        metavar="PAIRS",
        help="half-life of the averaged loads, in routed pairs per layer and expert (%(default)s)",
    )
