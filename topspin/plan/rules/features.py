"""The features of an engine that are combined with each other, and how a plan is seen to have one.

Owns their names, which are those of docs/combinations.md, and the conditions beside them that rows
of topspin.plan.rules.combinations name. tests/identity/test_matrix.py combines them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from topspin.plan.network import LOCALHOST
from topspin.plan.spec import EnginePlan, NodeSpec

IsIn = Callable[[EnginePlan, NodeSpec], object]
"""True of a plan, and of a node of it where one node is meant."""


class Feature(NamedTuple):
    """Something that a plan may have. Of the features of an `axis` it has one, or none.

    `needs` is what takes part, beside processes on CPUs that share their cores.
    """

    axis: str
    is_in: IsIn
    needs: str = ""


_GPU = "a GPU"


def _computes_attention(node: NodeSpec) -> bool:
    return node.role in ("attention", "stage")


def _is_plain(plan: EnginePlan) -> bool:
    """Return whether rows travel in the model's own type."""
    return plan.link.payload == ("fp32" if plan.model.dtype == "float32" else "bf16")


def _spills_to(plan: EnginePlan, *, memory: bool) -> bool:
    return plan.kv_cache.spill is not None and plan.kv_cache.spill.is_in_host_memory == memory


def _is_over(transport: str) -> IsIn:
    return lambda plan, node: plan.link.transport == transport


def _has(kernels: str) -> IsIn:
    return lambda plan, node: node.kernels == kernels


def _drafts_by(method: str) -> IsIn:
    return lambda plan, node: plan.speculation is not None and plan.speculation.method == method


def _local_layers(when: str) -> IsIn:
    return lambda plan, node: plan.local_experts is not None and plan.local_experts.when == when


FEATURES: Final[dict[str, Feature]] = {
    # A draft node is a process of its own.
    "transport `local`": Feature(
        "transport", lambda plan, node: plan.is_one_process and node.role != "draft"
    ),
    "transport `shm`": Feature("transport", _is_over("shm")),
    "transport `tcp`": Feature("transport", _is_over("tcp")),
    "transport `nixl`": Feature("transport", _is_over("nixl"), "the package nixl"),
    "transport `cuda_ipc`": Feature("transport", _is_over("cuda_ipc"), _GPU),
    "kernels `cpu`": Feature("kernels", _has("cpu")),
    "kernels `reference`": Feature("kernels", _has("reference")),
    "kernels `deterministic`": Feature("kernels", _has("deterministic")),
    "kernels `triton`": Feature("kernels", _has("triton"), _GPU),
    _GPU: Feature("device", lambda plan, node: node.place.is_gpu, _GPU),
    "attention and experts on one GPU, in one process": Feature(
        "processes", lambda plan, node: plan.shares_device, _GPU
    ),
    "several attention nodes": Feature(
        "attention nodes", lambda plan, node: len(plan.attention) > 1
    ),
    "several expert nodes": Feature("expert nodes", lambda plan, node: len(plan.experts) > 1),
    "optional nodes": Feature("optional", lambda plan, node: node.optional),
    "spare nodes": Feature(
        "standby",
        lambda plan, node: plan.failover.standby == "weights" and node.role != "draft",
        "two processes for each node",
    ),
    "stages": Feature("stages", lambda plan, node: plan.stages),
    "draft nodes": Feature("draft nodes", lambda plan, node: plan.drafts),
    "`cores`": Feature("cores", lambda plan, node: node.cores, "cores of their own"),
    "`wait: spin`": Feature("wait", lambda plan, node: node.wait != "block"),
    "`slow`": Feature("slow", lambda plan, node: node.slow > 1),
    "`network`": Feature("network", lambda plan, node: plan.network, "several hosts"),
    "several micro-batches": Feature(
        "micro-batches", lambda plan, node: (plan.scheduling.micro_batches or 1) > 1
    ),
    "micro-batches as measured": Feature(
        "micro-batches", lambda plan, node: plan.scheduling.micro_batches is None
    ),
    "payload `fp8`": Feature("payload", lambda plan, node: plan.link.payload == "fp8"),
    "payload `int8`": Feature("payload", lambda plan, node: plan.link.payload == "int8"),
    "an emulated link": Feature(
        "link", lambda plan, node: plan.link.latency_us > 0 or plan.link.gbps
    ),
    "`bfloat16`": Feature("dtype", lambda plan, node: plan.model.dtype == "bfloat16"),
    "quantised weights": Feature(
        "precision", lambda plan, node: any(rule.format != "none" for rule in plan.precision)
    ),
    "no recordings": Feature("recordings", lambda plan, node: not plan.execution.recordings),
    "no prefix cache": Feature(
        "prefix cache", lambda plan, node: not plan.scheduling.prefix_caching
    ),
    "keys in fp8": Feature(
        "keys", lambda plan, node: plan.kv_cache.fp8_setting and _computes_attention(node)
    ),
    "settings of single layers": Feature("rules", lambda plan, node: plan.kv_cache.layers),
    "key retrieval": Feature(
        "retrieval", lambda plan, node: plan.kv_cache.retrieval and _computes_attention(node)
    ),
    "spill to a file": Feature(
        "spill",
        lambda plan, node: _spills_to(plan, memory=False) and node.role == "attention",
    ),
    "spill to the host's memory": Feature(
        "spill",
        lambda plan, node: _spills_to(plan, memory=True) and node.role == "attention",
        _GPU,
    ),
    "drafts by suffix": Feature("drafts", _drafts_by("suffix")),
    "drafts by n-gram": Feature("drafts", _drafts_by("ngram")),
    "drafts by a model": Feature("drafts", _drafts_by("draft_model")),
    "drafts by suffix and model": Feature("drafts", _drafts_by("suffix+draft_model")),
    "drafts by the model's own head": Feature("drafts", _drafts_by("mtp")),
    "drafts that branch": Feature(
        "branches", lambda plan, node: plan.speculation and plan.speculation.branches
    ),
    "layers that are always local": Feature("local layers", _local_layers("always")),
    "layers that are local when measured": Feature("local layers", _local_layers("measured")),
}
"""By the name that people read."""

CONDITIONS: Final[dict[str, IsIn]] = {
    "kernels `cpu`, `deterministic`": lambda plan, node: node.kernels in ("cpu", "deterministic"),
    "kernels other than `cpu`": lambda plan, node: node.kernels != "cpu",
    "kernels other than `triton`": lambda plan, node: node.kernels != "triton",
    "kernels other than `deterministic`": lambda plan, node: (
        node.kernels != "deterministic" and node.role != "draft"
    ),
    "`execution.deterministic`": lambda plan, node: plan.execution.deterministic,
    "no `execution.deterministic`": lambda plan, node: (
        not plan.execution.deterministic and node.role != "draft"
    ),
    "a GPU, kernels `triton`": lambda plan, node: node.place.is_device,
    "attention on a GPU, or with kernels `triton`": lambda plan, node: (
        node.place.is_device and _computes_attention(node)
    ),
    "attention and experts on one GPU, transport `cuda_ipc`": lambda plan, node: (
        plan.shares_device or plan.link.transport == "cuda_ipc"
    ),
    "unequal `num_threads`": lambda plan, node: (
        node.role in ("attention", "expert") and node.num_threads != plan.attention[0].num_threads
    ),
    "another payload": lambda plan, node: not _is_plain(plan),
    "`deterministic` with another payload": lambda plan, node: (
        plan.execution.deterministic and not _is_plain(plan)
    ),
    "transports other than `shm` and `tcp`": lambda plan, node: (
        plan.link.transport not in ("shm", "tcp")
    ),
    "transports `shm`, `cuda_ipc`": lambda plan, node: plan.link.transport in ("shm", "cuda_ipc"),
    "transport `nixl`, unless `network.trusted`": lambda plan, node: (
        plan.link.transport == "nixl" and plan.network and not plan.network.trusted
    ),
    "spill": lambda plan, node: plan.kv_cache.spill,
    "no key retrieval": lambda plan, node: not plan.kv_cache.retrieval,
    "speculation": lambda plan, node: plan.speculation,
    "local layers": lambda plan, node: plan.local_experts,
    "roles `draft`, `stage`": lambda plan, node: node.role in ("draft", "stage"),
    "stages of them": lambda plan, node: (
        node.role == "attention" and any(stage.of == node.index for stage in plan.stages)
    ),
    "`restart: false`": lambda plan, node: not plan.failover.restart,
    "nodes on several hosts": lambda plan, node: (
        plan.network and node.role != "draft" and node.host != plan.attention[0].host
    ),
    "no `network`": lambda plan, node: plan.network is None,
    "`host`, `address`, `key` of a node": lambda plan, node: (
        (node.host, node.address, node.key) != (LOCALHOST, None, None)
    ),
}
"""What rows name beside features: several of these, or the lack of one."""


def is_in(name: str) -> IsIn:
    """Return what tells whether a plan has a feature, or meets a condition."""
    return FEATURES[name].is_in if name in FEATURES else CONDITIONS[name]
