"""The table of what does not go together in an engine, with reasons and ways out.

Owns the pairs. A plan that has both is refused by topspin.plan.checks; docs/combinations.md is
printed from here (`python -m topspin.plan.combinations`). What a number, an index or a model rules
out is in topspin.plan.checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from topspin.plan.network import LOCALHOST
from topspin.plan.spec import EnginePlan, NodeSpec

_SPILL = "kv_cache.spill (--kv-spill-dir)"
_RETRIEVAL = "kv_cache.retrieval (--kv-retrieval-tokens)"


class Conflict(NamedTuple):
    """Two things, for people, that no engine has together: a row of the table.

    `why` is the reason and, after a semicolon, a way out. `place` names what a plan has, with its
    `plan` and a `node` of it filled in. `is_met` is true of a plan, and of a node of it where the
    two belong to one node, that has both.
    """

    this: str
    other: str
    why: str
    place: str
    is_met: Callable[[EnginePlan, NodeSpec], object]

    @property
    def is_of_nodes(self) -> bool:
        """Return whether the two belong to one node."""
        return "{node}" in self.place


def conflicts_in(plan: EnginePlan) -> list[tuple[Conflict, str]]:
    """Return the rows that `plan` meets, each with what it says of the plan."""
    return [
        (row, f"{row.place.format(plan=plan, node=node)}: {row.why}")
        for row in CONFLICTS
        for node in (plan.nodes if row.is_of_nodes else plan.nodes[:1])
        if row.is_met(plan, node)
    ]


def print_page() -> str:
    """Return docs/combinations.md."""
    rows = [f"| {row.this} | {row.other} | {row.why} |" for row in CONFLICTS]
    return "\n".join([_HEAD, *rows, ""])


_HEAD = """# What does not go together

An engine plan that has both of a row is refused before anything starts, by the name of its fields.
All else that can be written down is served. Printed from `topspin/plan/combinations.py`.

| this | with this | because; instead |
|---|---|---|"""


def _computes_attention(node: NodeSpec) -> bool:
    return node.role in ("attention", "stage")


def _plain_payload(plan: EnginePlan) -> str:
    """Return the payload that is the model's own type."""
    return "fp32" if plan.model.dtype == "float32" else "bf16"


def _num_hosts(plan: EnginePlan) -> int:
    """Return how many hosts the link joins."""
    return len({node.host for node in plan.nodes if node.role != "draft"})


def _has_no_link(plan: EnginePlan) -> bool:
    return plan.shares_device or plan.link.transport == "cuda_ipc"


def _spills_to(plan: EnginePlan, *, memory: bool) -> bool:
    return plan.kv_cache.spill is not None and plan.kv_cache.spill.is_in_host_memory == memory


def _is_measured(plan: EnginePlan) -> bool:
    return plan.local_experts is not None and plan.local_experts.when == "measured"


_IN_MEMORY = (
    "kernels of GPUs hand rows over in memory, where there is no such thing; leave it out, or use "
    "transport shm"
)

CONFLICTS: Final = (
    Conflict(
        "a GPU",
        "kernels `cpu`, `deterministic`",
        "these compute on the CPU only; use triton",
        "{node}: device {node.device}, kernels {node.kernels}",
        lambda plan, node: node.place.is_gpu and node.kernels in ("cpu", "deterministic"),
    ),
    Conflict(
        "a GPU",
        "`cores`",
        "a node on a GPU needs none of its own; leave them out",
        "{node}: cores {node.cores}",
        lambda plan, node: node.place.is_gpu and node.cores,
    ),
    Conflict(
        "a GPU, kernels `triton`",
        "`slow`",
        "only nodes that compute on the CPU, without the kernels triton, are slowed down; leave it "
        "out",
        "{node}: slow {node.slow:g}",
        lambda plan, node: node.slow > 1 and node.place.is_device,
    ),
    Conflict(
        "kernels `deterministic`",
        "other kernels, or no `execution.deterministic`",
        "these kernels and that setting (--deterministic) need each other; give both to all "
        "attention and expert nodes, or to none",
        "{node}: kernels {node.kernels} with execution.deterministic "
        "{plan.execution.deterministic}",
        lambda plan, node: (
            node.role != "draft"
            and (node.kernels == "deterministic") != plan.execution.deterministic
        ),
    ),
    Conflict(
        "kernels `deterministic`",
        "key retrieval",
        "these kernels attend to all keys; leave out one of them",
        _RETRIEVAL + ": {node} has the kernels {node.kernels}",
        lambda plan, node: (
            plan.kv_cache.retrieval
            and _computes_attention(node)
            and node.kernels == "deterministic"
        ),
    ),
    Conflict(
        "keys in fp8",
        "kernels `triton`",
        "only kernels for the CPU keep keys in fp8; leave their type at auto",
        "{plan.kv_cache.fp8_setting}: {node} has the kernels {node.kernels}",
        lambda plan, node: (
            plan.kv_cache.fp8_setting and _computes_attention(node) and node.kernels == "triton"
        ),
    ),
    Conflict(
        "spill",
        "no key retrieval",
        f"without {_RETRIEVAL} every token attends to keys that must be in memory; give both",
        _SPILL,
        lambda plan, node: plan.kv_cache.spill and not plan.kv_cache.retrieval,
    ),
    Conflict(
        "spill",
        "settings of single layers",
        f"with {_SPILL} the keys of all layers must be searched and of one type; leave out one of "
        "them",
        "kv_cache.layers",
        lambda plan, node: plan.kv_cache.spill and plan.kv_cache.layers,
    ),
    Conflict(
        "spill",
        "drafts that branch",
        "drafts that branch attend to all keys; set speculation.branches to false",
        _SPILL,
        lambda plan, node: plan.kv_cache.spill and plan.speculation and plan.speculation.branches,
    ),
    Conflict(
        "spill to a file",
        "kernels other than `cpu`",
        "only cpu reads selected keys from a file; beside a GPU spill to host:SIZE",
        _SPILL + ": {node} has the kernels {node.kernels}",
        lambda plan, node: (
            _spills_to(plan, memory=False) and node.role == "attention" and node.kernels != "cpu"
        ),
    ),
    Conflict(
        "spill to the host's memory",
        "kernels other than `triton`",
        "only triton reads selected keys from the host's memory; spill to a file",
        _SPILL + ": {node} has the kernels {node.kernels}",
        lambda plan, node: (
            _spills_to(plan, memory=True) and node.role == "attention" and node.kernels != "triton"
        ),
    ),
    Conflict(
        "transport `local`",
        "`cores`",
        "all nodes are one process; leave them out, or use shm",
        "{node}: cores {node.cores}",
        lambda plan, node: plan.is_one_process and node.role != "draft" and node.cores,
    ),
    Conflict(
        "transport `local`",
        "unequal `num_threads`",
        "all nodes are one process, whose threads are counted once; give them the same number",
        "{node}: num_threads {node.num_threads}, and {plan.attention[0]} has num_threads "
        "{plan.attention[0].num_threads}",
        lambda plan, node: (
            plan.is_one_process
            and node.role in ("attention", "expert")
            and node.num_threads != plan.attention[0].num_threads
        ),
    ),
    Conflict(
        "attention and experts on one GPU, in one process",
        "another payload",
        _IN_MEMORY,
        "links[0]: payload {plan.link.payload} (--m2n-payload) with transport "
        "{plan.link.transport}",
        lambda plan, node: plan.shares_device and plan.link.payload != _plain_payload(plan),
    ),
    Conflict(
        "attention and experts on one GPU, in one process",
        "`wait: spin`",
        _IN_MEMORY,
        "{node}: wait {node.wait} with transport {plan.link.transport}",
        lambda plan, node: node.wait != "block" and plan.shares_device,
    ),
    Conflict(
        "attention and experts on one GPU, transport `cuda_ipc`",
        "an emulated link",
        _IN_MEMORY,
        "links[0]: latency_us {plan.link.latency_us:g}, gbps {plan.link.gbps} with transport "
        "{plan.link.transport}",
        lambda plan, node: _has_no_link(plan) and (plan.link.latency_us > 0 or plan.link.gbps),
    ),
    Conflict(
        "`gpu_streams` 2",
        "nodes on several devices, or in several processes",
        "only attention and experts on one GPU, in one process, overlap on two streams; leave it "
        "out",
        "execution.gpu_streams {plan.execution.gpu_streams}",
        lambda plan, node: plan.execution.gpu_streams > 1 and not plan.shares_device,
    ),
    Conflict(
        "layers that are local when measured",
        "attention and experts on one GPU, in one process",
        "attention and experts share a device, where no layer has a hop; leave it out",
        "local_experts",
        lambda plan, node: _is_measured(plan) and plan.shares_device,
    ),
    Conflict(
        "layers that are local when measured",
        "`deterministic` with another payload",
        "that payload rounds rows on their way, so bits depend on where a layer is computed; use "
        "the payload of the model's type, or when always",
        "local_experts: links[0].payload {plan.link.payload}",
        lambda plan, node: (
            _is_measured(plan)
            and plan.execution.deterministic
            and plan.link.payload != _plain_payload(plan)
        ),
    ),
    Conflict(
        "stages",
        "transports other than `shm` and `tcp`",
        "stages pass rows on over shm or tcp; use one of them",
        "links[0]: transport {plan.link.transport}",
        lambda plan, node: plan.stages and plan.link.transport not in ("shm", "tcp"),
    ),
    Conflict(
        "stages",
        "attention on a GPU, or with kernels `triton`",
        "stages, and attention nodes that have some, compute on the CPU with kernels for it; leave "
        "out the stages",
        "{node}: device {node.device}, kernels {node.kernels}",
        lambda plan, node: _computes_attention(node) and node.place.is_device and plan.stages,
    ),
    Conflict(
        "stages",
        "speculation",
        "how many tokens of a draft are kept, stages do not know; leave out speculation, or the "
        "stages",
        "{plan.stages[0]}: speculation",
        lambda plan, node: plan.stages and plan.speculation,
    ),
    Conflict(
        "stages",
        "local layers",
        "stages hold no routed experts; leave out local_experts, or the stages",
        "{plan.stages[0]}: local_experts",
        lambda plan, node: plan.stages and plan.local_experts,
    ),
    Conflict(
        "stages",
        "key retrieval",
        "codes of keys are not cut by layers; leave out retrieval, or the stages",
        "{plan.stages[0]}: kv_cache.retrieval",
        lambda plan, node: plan.stages and plan.kv_cache.retrieval,
    ),
    Conflict(
        "optional nodes",
        "roles `draft`, `stage`",
        "only attention and expert nodes can be; leave out optional",
        "{node}: optional",
        lambda plan, node: node.optional and node.role in ("draft", "stage"),
    ),
    Conflict(
        "optional nodes",
        "transport `local`",
        "with transport local all nodes are one process, which is there or not; use shm or tcp",
        "{node}: optional",
        lambda plan, node: node.optional and plan.is_one_process,
    ),
    Conflict(
        "optional nodes",
        "`restart: false`",
        "nodes join late by failover.restart (--restart on), which is off; set it to true",
        "{node}: optional",
        lambda plan, node: node.optional and not plan.failover.restart,
    ),
    Conflict(
        "optional nodes",
        "stages of them",
        "a stage computes layers of it, and stages do not join late; leave out optional, or the "
        "stages",
        "{node}: optional",
        lambda plan, node: (
            node.optional
            and node.role == "attention"
            and any(stage.of == node.index for stage in plan.stages)
        ),
    ),
    Conflict(
        "`network`",
        "transport `local`",
        "it joins threads; use shm or tcp",
        "links[0]: transport {plan.link.transport}",
        lambda plan, node: plan.network and plan.is_one_process,
    ),
    Conflict(
        "nodes on several hosts",
        "transports `shm`, `cuda_ipc`",
        "it joins processes of one host; use tcp or nixl",
        "links[0]: transport {plan.link.transport}: {node} is on {node.host}, and "
        "{plan.attention[0]} on {plan.attention[0].host}",
        lambda plan, node: (
            plan.network
            and plan.link.transport in ("shm", "cuda_ipc")
            and node.role != "draft"
            and node.host != plan.attention[0].host
        ),
    ),
    Conflict(
        "nodes on several hosts",
        "transport `nixl`, unless `network.trusted`",
        "one-sided writes between hosts carry no authentication; set network.trusted if nobody "
        "else can send to this network, or use tcp",
        "links[0]: transport {plan.link.transport}",
        lambda plan, node: (
            plan.network
            and not plan.network.trusted
            and _num_hosts(plan) > 1
            and plan.link.transport == "nixl"
        ),
    ),
    Conflict(
        "no `network`",
        "`host`, `address`, `key` of a node",
        "nodes of one host find each other by themselves, without keys; leave them out, or give "
        "`network`",
        "{node}: host {node.host}, address {node.address}, key {node.key}",
        lambda plan, node: (
            plan.network is None and (node.host, node.address, node.key) != (LOCALHOST, None, None)
        ),
    ),
)


if __name__ == "__main__":
    print(print_page(), end="")
