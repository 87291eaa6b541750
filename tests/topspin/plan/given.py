"""Plans that are given a feature or a condition of topspin.plan.rules.features, by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from msgspec.structs import replace

from tests.structs import changed
from topspin.plan.kv_cache import KvLayerRule
from topspin.plan.local_experts import LocalExperts
from topspin.plan.network import NetworkSpec
from topspin.plan.precision import rules_of
from topspin.plan.retrieval import SpillSpec, policy_of
from topspin.plan.rules.model_facts import ModelFacts
from topspin.plan.spec import DraftNode, EnginePlan, StageNode
from topspin.plan.speculation import Speculation

Giver = Callable[[EnginePlan, ModelFacts], EnginePlan]
BUDGET = 96
"""Keys that a token attends to, with retrieval."""


def given(plan: EnginePlan, facts: ModelFacts, names: Iterable[str]) -> EnginePlan:
    """Return `plan` with the features and conditions `names`, in the order of GIVERS."""
    wanted = set(names)
    assert wanted <= GIVERS.keys(), f"say here how a plan is given {wanted - GIVERS.keys()}"
    for name, give in GIVERS.items():
        if name in wanted:
            plan = give(plan, facts)
    return plan


def fields(**values: object) -> Giver:
    """Return what sets fields of the plan; `a__b` is field b of part a."""
    paths = {name.replace("__", "."): value for name, value in values.items()}
    return lambda plan, facts: changed(plan, paths)


def link(**values: Any) -> Giver:
    return lambda plan, facts: changed(plan, {"links": (replace(plan.link, **values),)})


def nodes(**values: Any) -> Giver:
    """Return what sets fields of all nodes but draft nodes."""
    return lambda plan, facts: changed(
        plan,
        {"nodes": tuple(n if n.role == "draft" else replace(n, **values) for n in plan.nodes)},
    )


def first(index: int = 0, **values: Any) -> Giver:
    """Return what sets fields of one node, by its place in the plan."""

    def give(plan: EnginePlan, facts: ModelFacts) -> EnginePlan:
        found = list(plan.nodes)
        found[index] = replace(found[index], **values)
        return changed(plan, {"nodes": tuple(found)})

    return give


def both(*givers: Giver) -> Giver:
    def give(plan: EnginePlan, facts: ModelFacts) -> EnginePlan:
        for each in givers:
            plan = each(plan, facts)
        return plan

    return give


def two_attention_nodes(plan: EnginePlan, facts: ModelFacts) -> EnginePlan:
    attention = plan.attention[0]
    return changed(plan, {"nodes": (attention, replace(attention, index=1), *plan.experts)})


def two_expert_nodes(plan: EnginePlan, facts: ModelFacts) -> EnginePlan:
    if len(plan.experts) > 1:
        return plan
    half = facts.num_experts // 2
    experts = [replace(each, index=i, experts=half) for each in plan.experts for i in (0, 1)]
    return changed(plan, {"nodes": (*plan.attention, *experts)})


def optional_nodes(plan: EnginePlan, facts: ModelFacts) -> EnginePlan:
    """Give a second attention node that is optional, as is the last of several expert nodes."""
    plan = two_attention_nodes(plan, facts)
    first, second = plan.attention
    experts = [replace(each, experts=facts.num_experts) for each in plan.experts]
    experts = [replace(each, optional=each.index > 0) for each in experts]
    parts = {
        "nodes": (first, replace(second, optional=True), *experts),
        "failover.restart": True,
        "balance.interval_s": 0.0,
    }
    return changed(plan, parts)


def stages(plan: EnginePlan, facts: ModelFacts) -> EnginePlan:
    """Give each attention node a stage with all layers but the first."""
    cut = [
        StageNode(
            index=each.index,
            device=each.device,
            kernels=each.kernels,
            wait=each.wait,
            num_threads=each.num_threads,
            of=each.index,
            layers=(1, facts.num_layers),
            kv_cache_bytes=each.kv_cache_bytes or 2**20,
        )
        for each in plan.attention
    ]
    attention = [replace(each, layers=(0, 1)) for each in plan.attention]
    return changed(plan, {"nodes": (*attention, *cut, *plan.experts)})


def drafts(method: Any) -> Giver:
    has_model = method in ("draft_model", "suffix+draft_model")

    def give(plan: EnginePlan, facts: ModelFacts) -> EnginePlan:
        asked = Speculation(
            method=method,
            model=plan.model.path if has_model else None,
            num_speculative_tokens=4,
            adaptive=False,
            prompt_lookup_min=None if method in ("draft_model", "mtp") else 1,
        )
        return changed(plan, {"speculation": asked})

    return give


def branches(plan: EnginePlan, facts: ModelFacts) -> EnginePlan:
    asked = plan.speculation or Speculation(method="suffix", adaptive=False)
    return changed(plan, {"speculation": replace(asked, branches=True)})


def draft_nodes(plan: EnginePlan, facts: ModelFacts) -> EnginePlan:
    if plan.speculation is None or not plan.speculation.has_model:
        has_branches = plan.speculation is not None and plan.speculation.branches
        plan = drafts("draft_model")(plan, facts)
        plan = changed(plan, {"speculation.branches": has_branches})
    node = DraftNode(
        index=0, device="cpu", kernels="cpu", wait="block", num_threads=1, kv_cache_tokens=8192
    )
    return changed(plan, {"nodes": (*plan.nodes, node)})


def single_layers(plan: EnginePlan, facts: ModelFacts) -> EnginePlan:
    """Keep the first layer otherwise than all others."""
    dtype: Literal["fp8", "auto"] = "fp8" if plan.kv_cache.dtype == "auto" else "auto"
    return changed(plan, {"kv_cache.layers": (KvLayerRule(layers=(0,), dtype=dtype),)})


def spill(directory: str) -> Giver:
    return both(
        fields(kv_cache__retrieval=policy_of(BUDGET)),
        fields(kv_cache__spill=SpillSpec(directory=directory, size_bytes=2**26)),
    )


def local(when: Literal["always", "measured"]) -> Giver:
    def give(plan: EnginePlan, facts: ModelFacts) -> EnginePlan:
        layers = facts.moe_layers[-1:] if when == "always" else facts.moe_layers
        if not layers:
            return plan
        return changed(plan, {"local_experts": LocalExperts(layers=layers, when=when)})

    return give


def in_bfloat16(plan: EnginePlan, facts: ModelFacts) -> EnginePlan:
    return link(payload="bf16")(changed(plan, {"model.dtype": "bfloat16"}), facts)


ON_GPU: dict[str, Any] = {"device": "cuda:0", "kernels": "triton"}
HERE = fields(network=NetworkSpec(control="tcp://10.0.0.1:7000"))
THERE = both(HERE, nodes(host="10.0.0.1"), first(-1, host="10.0.0.2"))

GIVERS: dict[str, Giver] = {
    "several attention nodes": two_attention_nodes,
    "several expert nodes": two_expert_nodes,
    "optional nodes": optional_nodes,
    "spare nodes": fields(failover__standby="weights", failover__restart=True),
    "stages": stages,
    "drafts by suffix": drafts("suffix"),
    "drafts by n-gram": drafts("ngram"),
    "drafts by a model": drafts("draft_model"),
    "drafts by suffix and model": drafts("suffix+draft_model"),
    "drafts by the model's own head": drafts("mtp"),
    "speculation": drafts("suffix"),
    "drafts that branch": branches,
    "draft nodes": draft_nodes,
    "transport `local`": link(transport="local"),
    "transport `shm`": link(transport="shm"),
    "transport `tcp`": link(transport="tcp"),
    "transport `nixl`": link(transport="nixl"),
    "transport `cuda_ipc`": link(transport="cuda_ipc"),
    "kernels `cpu`": nodes(kernels="cpu"),
    "kernels `reference`": nodes(kernels="reference"),
    "kernels `deterministic`": both(
        nodes(kernels="deterministic"), fields(execution__deterministic=True)
    ),
    "kernels `triton`": nodes(kernels="triton"),
    "`bfloat16`": in_bfloat16,
    "payload `fp8`": link(payload="fp8"),
    "payload `int8`": link(payload="int8"),
    "an emulated link": link(latency_us=20.0),
    "`wait: spin`": nodes(wait="spin"),
    "`slow`": nodes(slow=1.5),
    "several micro-batches": fields(scheduling__micro_batches=3),
    "micro-batches as measured": fields(scheduling__micro_batches=None),
    "quantised weights": fields(precision=rules_of("int8")),
    "no recordings": fields(execution__recordings=False),
    "no prefix cache": fields(scheduling__prefix_caching=False),
    "keys in fp8": fields(kv_cache__dtype="fp8"),
    "settings of single layers": single_layers,
    "key retrieval": fields(kv_cache__retrieval=policy_of(BUDGET)),
    "spill to a file": spill("/tmp"),
    "spill to the host's memory": spill("host"),
    "layers that are always local": local("always"),
    "layers that are local when measured": local("measured"),
    # What is not combined with all others, and conditions.
    "a GPU": nodes(**ON_GPU),
    "attention and experts on one GPU, in one process": both(
        nodes(**ON_GPU), link(transport="local")
    ),
    "`cores`": first(cores=(0,)),
    "`network`": HERE,
    "kernels `cpu`, `deterministic`": nodes(kernels="cpu"),
    "kernels other than `cpu`": nodes(kernels="reference"),
    "kernels other than `triton`": nodes(kernels="cpu"),
    "kernels other than `deterministic`": nodes(kernels="cpu"),
    "`execution.deterministic`": fields(execution__deterministic=True),
    "no `execution.deterministic`": fields(execution__deterministic=False),
    "a GPU, kernels `triton`": nodes(**ON_GPU),
    "attention on a GPU, or with kernels `triton`": first(**ON_GPU),
    "attention and experts on one GPU, transport `cuda_ipc`": both(
        nodes(**ON_GPU), link(transport="cuda_ipc")
    ),
    "unequal `num_threads`": first(-1, num_threads=2),
    "another payload": link(payload="fp8"),
    "`deterministic` with another payload": both(
        nodes(kernels="deterministic"), fields(execution__deterministic=True), link(payload="int8")
    ),
    "transports other than `shm` and `tcp`": link(transport="local"),
    "spill": spill("/tmp"),
    "no key retrieval": fields(kv_cache__retrieval=None),
    "local layers": local("measured"),
    "roles `draft`, `stage`": both(draft_nodes, first(-1, optional=True)),
    "stages of them": both(two_attention_nodes, first(optional=True), stages),
    "`restart: false`": fields(failover__restart=False),
    "nodes on several hosts": THERE,
    "transports `shm`, `cuda_ipc`": link(transport="shm"),
    "transport `nixl`, unless `network.trusted`": link(transport="nixl"),
    "no `network`": fields(network=None),
    "`host`, `address`, `key` of a node": first(host="node7"),
}
