"""The table of what does not go together in an engine, with reasons and ways out.

Owns the pairs, by the names of topspin.plan.rules.features. A plan that has both is refused by
topspin.plan.rules.checks; docs/combinations.md is printed from here (`python -m
topspin.plan.rules.combinations`), and tests/identity/test_matrix.py runs all other pairs of
features. What a number, an index or a model rules out is in topspin.plan.rules.checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from topspin.plan.network import LOCALHOST
from topspin.plan.rules.features import FEATURES, is_in
from topspin.plan.spec import EnginePlan, NodeSpec


class Conflict(NamedTuple):
    """Two features or conditions, by name, that no engine has together: a row of the table.

    `why` is the reason and, after a semicolon, a way out. `place` names what a plan has, with its
    `plan` and a `node` of it filled in.
    """

    this: str
    other: str
    why: str
    place: str

    def found_in(self, plan: EnginePlan, kinds: Mapping[NodeSpec, Sequence[NodeSpec]]) -> list[str]:
        """Return what the row says of `plan`: of each node that has both, or once of the plan.

        `kinds`: the nodes that are alike (kinds_of).
        """
        this, other = is_in(self.this), is_in(self.other)
        found = [nodes for kind, nodes in kinds.items() if this(plan, kind) and other(plan, kind)]
        texts = [
            f"{self.place.format(plan=plan, node=node)}: {self.why}"
            for nodes in found
            for node in nodes
        ]
        return texts if "{node}" in self.place else texts[:1]


def kinds_of(plan: EnginePlan) -> dict[NodeSpec, list[NodeSpec]]:
    """Return the nodes by what features see of them: no index, and few hosts by name."""
    kinds: dict[NodeSpec, list[NodeSpec]] = {}
    named = {LOCALHOST, *(node.host for node in plan.attention[:1])}
    for node in plan.nodes:
        host = node.host if node.host in named else "another host"
        kind = msgspec.structs.replace(node, index=0, host=host)
        kinds.setdefault(kind, []).append(node)
    return kinds


def conflicts_in(plan: EnginePlan) -> list[tuple[Conflict, str]]:
    """Return the rows that `plan` meets, each with what it says of the plan."""
    kinds = kinds_of(plan)
    return [(row, text) for row in CONFLICTS for text in row.found_in(plan, kinds)]


def print_page() -> str:
    """Return docs/combinations.md."""
    needs: dict[str, list[str]] = {}
    for name, feature in FEATURES.items():
        needs.setdefault(feature.needs, []).append(name)
    tried = needs.pop("")
    others = [f"* with {what}: {', '.join(names)}" for what, names in needs.items()]
    others = ["What needs more is tested by itself, and not in all pairs:", "", *others]
    rows = [f"| {row.this} | {row.other} | {row.why} |" for row in CONFLICTS]
    return "\n".join([_HEAD, *rows, _TAIL, ", ".join(tried) + ".", "", *others, _MODELS])


_HEAD = """# What does not go together

An engine plan that has both of a row is refused before anything starts, by the name of its fields.
Printed from `topspin/plan/rules/combinations.py`.

| this | with this | because; instead |
|---|---|---|"""
_TAIL = """
## What is tested together

Every other pair of these features that a plan can have is in an engine of
`tests/identity/test_matrix.py`, which gives the tokens of the reference; three and more at once are
tested as they happen to meet there.
"""
_MODELS = """
## Parts of models

Each of these features is tested with each of four models as well, which have

* attention sinks, windows in every second layer, experts with biases and a clamped activation, and
  a router of plain logits;
* a shared expert behind a gate, windows and dense layers here and there;
* a sigmoid router with groups and a bias, heads that are rotated in part and normed, a shared
  expert without a gate, and a dense first layer;
* dense layers with biases only;

but for what a model rules out. That is refused before anything starts, too:

| the model has | not with |
|---|---|
| layers with a window | spill; `retrieval: true` of these layers |
| windows in all layers | key retrieval |
| heads of a size that 8 does not divide | key retrieval |
| keys rotated by the length of their prompt (dynamic NTK) | the prefix cache |
| no routed experts | expert nodes, local layers |

Formats that kernels lack rule out more, and a file of spilled keys is for some sizes of heads only:
the message says so.
"""

_SPILL = "kv_cache.spill (--kv-spill-dir)"
_RETRIEVAL = "kv_cache.retrieval (--kv-retrieval-tokens)"


_IN_MEMORY = (
    "kernels of GPUs hand rows over in memory, where there is no such thing; leave it out, or use "
    "transport shm"
)
_ALL_OR_NONE = (
    "these kernels and that setting (--deterministic) need each other; give both to all attention "
    "and expert nodes, or to none",
    "{node}: kernels {node.kernels} with execution.deterministic {plan.execution.deterministic}",
)

CONFLICTS: Final = (
    Conflict(
        "a GPU",
        "kernels `cpu`, `deterministic`",
        "these compute on the CPU only; use triton",
        "{node}: device {node.device}, kernels {node.kernels}",
    ),
    Conflict(
        "a GPU",
        "`cores`",
        "a node on a GPU needs none of its own; leave them out",
        "{node}: cores {node.cores}",
    ),
    Conflict(
        "a GPU, kernels `triton`",
        "`slow`",
        "only nodes that compute on the CPU, without the kernels triton, are slowed down; leave it "
        "out",
        "{node}: slow {node.slow:g}",
    ),
    Conflict("kernels `deterministic`", "no `execution.deterministic`", *_ALL_OR_NONE),
    Conflict("`execution.deterministic`", "kernels other than `deterministic`", *_ALL_OR_NONE),
    Conflict(
        "kernels `deterministic`",
        "key retrieval",
        "these kernels attend to all keys; leave out one of them",
        _RETRIEVAL + ": {node} has the kernels {node.kernels}",
    ),
    Conflict(
        "keys in fp8",
        "kernels `triton`",
        "only kernels for the CPU keep keys in fp8; leave their type at auto",
        "{plan.kv_cache.fp8_setting}: {node} has the kernels {node.kernels}",
    ),
    Conflict(
        "spill",
        "no key retrieval",
        f"without {_RETRIEVAL} every token attends to keys that must be in memory; give both",
        _SPILL,
    ),
    Conflict(
        "spill",
        "settings of single layers",
        f"with {_SPILL} the keys of all layers must be searched and of one type; leave out one of "
        "them",
        "kv_cache.layers",
    ),
    Conflict(
        "spill",
        "drafts that branch",
        "drafts that branch attend to all keys; set speculation.branches to false",
        _SPILL,
    ),
    Conflict(
        "drafts by the model's own head",
        "attention on a GPU, or with kernels `triton`",
        "heads of multi-token prediction draft beside attention on CPUs only; choose another "
        "method",
        'speculation.method "mtp": {node} has the kernels {node.kernels}',
    ),
    Conflict(
        "spill to a file",
        "kernels other than `cpu`",
        "only cpu reads selected keys from a file; beside a GPU spill to host:SIZE",
        _SPILL + ": {node} has the kernels {node.kernels}",
    ),
    Conflict(
        "spill to the host's memory",
        "kernels other than `triton`",
        "only triton reads selected keys from the host's memory; spill to a file",
        _SPILL + ": {node} has the kernels {node.kernels}",
    ),
    Conflict(
        "transport `local`",
        "`cores`",
        "all nodes are one process; leave them out, or use shm",
        "{node}: cores {node.cores}",
    ),
    Conflict(
        "transport `local`",
        "unequal `num_threads`",
        "all nodes are one process, whose threads are counted once; give them the same number",
        "{node}: num_threads {node.num_threads}, and {plan.attention[0]} has num_threads "
        "{plan.attention[0].num_threads}",
    ),
    Conflict(
        "attention and experts on one GPU, in one process",
        "another payload",
        _IN_MEMORY,
        "links[0]: payload {plan.link.payload} (--m2n-payload) with transport "
        "{plan.link.transport}",
    ),
    Conflict(
        "attention and experts on one GPU, in one process",
        "`wait: spin`",
        _IN_MEMORY,
        "{node}: wait {node.wait} with transport {plan.link.transport}",
    ),
    Conflict(
        "attention and experts on one GPU, transport `cuda_ipc`",
        "an emulated link",
        _IN_MEMORY,
        "links[0]: latency_us {plan.link.latency_us:g}, gbps {plan.link.gbps} with transport "
        "{plan.link.transport}",
    ),
    Conflict(
        "layers that are local when measured",
        "attention and experts on one GPU, in one process",
        "attention and experts share a device, where no layer has a hop; leave it out",
        "local_experts",
    ),
    Conflict(
        "layers that are local when measured",
        "`deterministic` with another payload",
        "that payload rounds rows on their way, so bits depend on where a layer is computed; use "
        "the payload of the model's type, or when always",
        "local_experts: links[0].payload {plan.link.payload}",
    ),
    Conflict(
        "stages",
        "transports other than `shm` and `tcp`",
        "stages pass rows on over shm or tcp; use one of them",
        "links[0]: transport {plan.link.transport}",
    ),
    Conflict(
        "stages",
        "attention on a GPU, or with kernels `triton`",
        "stages, and attention nodes that have some, compute on the CPU with kernels for it; leave "
        "out the stages",
        "{node}: device {node.device}, kernels {node.kernels}",
    ),
    Conflict(
        "stages",
        "speculation",
        "how many tokens of a draft are kept, stages do not know; leave out speculation, or the "
        "stages",
        "{plan.stages[0]}: speculation",
    ),
    Conflict(
        "stages",
        "local layers",
        "stages hold no routed experts; leave out local_experts, or the stages",
        "{plan.stages[0]}: local_experts",
    ),
    Conflict(
        "stages",
        "key retrieval",
        "codes of keys are not cut by layers; leave out retrieval, or the stages",
        "{plan.stages[0]}: kv_cache.retrieval",
    ),
    Conflict(
        "optional nodes",
        "roles `draft`, `stage`",
        "only attention and expert nodes can be; leave out optional",
        "{node}: optional",
    ),
    Conflict(
        "optional nodes",
        "transport `local`",
        "with transport local all nodes are one process, which is there or not; use shm or tcp",
        "{node}: optional",
    ),
    Conflict(
        "optional nodes",
        "`restart: false`",
        "nodes join late by failover.restart (--restart on), which is off; set it to true",
        "{node}: optional",
    ),
    Conflict(
        "optional nodes",
        "stages of them",
        "a stage computes layers of it, and stages do not join late; leave out optional, or the "
        "stages",
        "{node}: optional",
    ),
    Conflict(
        "spare nodes",
        "transport `local`",
        "with transport local all nodes are one process; use shm or tcp, or failover.standby "
        "imports",
        "failover.standby weights",
    ),
    Conflict(
        "spare nodes",
        "`restart: false`",
        "one takes a place by failover.restart (--restart on), which is off; set it to true",
        "failover.standby weights",
    ),
    Conflict(
        "spare nodes",
        "stages",
        "a stage and its attention node are lost together; leave out the stages, or use "
        "failover.standby imports",
        "failover.standby weights",
    ),
    Conflict(
        "spare nodes",
        "a GPU, kernels `triton`",
        "a second process would take half of the device's memory; use failover.standby imports",
        "failover.standby weights: {node}",
    ),
    Conflict(
        "`network`",
        "transport `local`",
        "it joins threads; use shm or tcp",
        "links[0]: transport {plan.link.transport}",
    ),
    Conflict(
        "nodes on several hosts",
        "transports `shm`, `cuda_ipc`",
        "it joins processes of one host; use tcp or nixl",
        "links[0]: transport {plan.link.transport}: {node} is on {node.host}, and "
        "{plan.attention[0]} on {plan.attention[0].host}",
    ),
    Conflict(
        "nodes on several hosts",
        "transport `nixl`, unless `network.trusted`",
        "one-sided writes between hosts carry no authentication; set network.trusted if nobody "
        "else can send to this network, or use tcp",
        "links[0]: transport {plan.link.transport}",
    ),
    Conflict(
        "no `network`",
        "`host`, `address`, `key` of a node",
        "nodes of one host find each other by themselves, without keys; leave them out, or give "
        "`network`",
        "{node}: host {node.host}, address {node.address}, key {node.key}",
    ),
)


if __name__ == "__main__":
    print(print_page(), end="")
