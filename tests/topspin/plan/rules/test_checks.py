"""Plans that no engine could run, by more than a row of the table, and plans in order."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.structs import with_nodes
from tests.topspin.plan.nodes import (
    ATTENTION,
    DRAFT,
    EXPERT,
    HEAD,
    LINK,
    LOCAL,
    ON_GPU,
    SELF,
    cut,
    made_of,
    stage,
)
from tests.topspin.plans import plan
from topspin.errors import ConfigError
from topspin.plan.kv_cache import KvCacheSpec, KvLayerRule
from topspin.plan.network import NetworkSpec
from topspin.plan.rules.checks import check_plan
from topspin.plan.settings import ExecutionPolicy, FailoverPolicy
from topspin.plan.spec import EnginePlan, LinkSpec


def on_one_gpu(*, link: LinkSpec = LOCAL, **fields: Any) -> EnginePlan:
    nodes = replace(ATTENTION, **ON_GPU, **fields), replace(EXPERT, **ON_GPU)
    return made_of(*nodes, link=link)


def changed(*, link: LinkSpec = LINK, **fields: Any) -> EnginePlan:
    """Return a plan whose attention node has these `fields`."""
    return made_of(replace(ATTENTION, **fields), EXPERT, link=link)


def kept_as(*rules: KvLayerRule, **fields: Any) -> EnginePlan:
    """Return a plan with settings of single layers."""
    return replace(changed(), kv_cache=KvCacheSpec(layers=rules, **fields))


OTHER = replace(ATTENTION, index=1, optional=True)


def growing(*nodes: Any) -> EnginePlan:
    return made_of(*nodes, failover=FailoverPolicy(restart=True))


def spread(control: str) -> EnginePlan:
    """Return a plan whose last node is on another host."""
    *nodes, last = with_nodes(plan(transport="tcp"), host="10.0.0.1").nodes
    nodes = [*nodes, replace(last, host="10.0.0.2")]
    return replace(plan(transport="tcp"), nodes=tuple(nodes), network=NetworkSpec(control=control))


@pytest.mark.parametrize(
    "made",
    [
        # Unequal nodes of both roles.
        made_of(
            replace(ATTENTION, num_threads=1, cores=(0,), wait="spin"),
            replace(ATTENTION, index=1, max_num_seqs=64, kv_cache_bytes=2**30, cores=(2, 3)),
            replace(EXPERT, experts=6, kernels="reference"),
            replace(EXPERT, index=1, experts=2, num_threads=4, device="cuda:1", kernels="triton"),
        ),
        changed(**ON_GPU, kv_cache_bytes=None),
        changed(max_num_batched_tokens=8),
        on_one_gpu(),
        changed(link=replace(LOCAL, gbps=5.0, latency_us=1.0, payload="int8"), wait="spin"),
        changed(link=LOCAL, num_threads=None),
        changed(slow=2.5),
        made_of(ATTENTION, link=LOCAL),
        made_of(ATTENTION, EXPERT, DRAFT, speculation=SELF),
        made_of(ATTENTION, EXPERT, replace(DRAFT, **ON_GPU), speculation=SELF),
        made_of(
            replace(ATTENTION, **ON_GPU, kv_cache_bytes=None),
            EXPERT,
            replace(DRAFT, device="cuda:1", kernels="triton"),
            speculation=SELF,
        ),
        # A process of its own beside that of the others, with other threads and kernels.
        made_of(
            replace(ATTENTION, num_threads=2),
            replace(EXPERT, num_threads=2),
            replace(DRAFT, num_threads=1, cores=(1,)),
            link=LOCAL,
            speculation=SELF,
        ),
        made_of(
            replace(ATTENTION, kernels="deterministic"),
            replace(EXPERT, kernels="deterministic"),
            DRAFT,
            speculation=SELF,
            execution=ExecutionPolicy(deterministic=True),
        ),
        made_of(
            replace(ATTENTION, kernels="deterministic"),
            replace(EXPERT, kernels="deterministic"),
            execution=ExecutionPolicy(deterministic=True),
        ),
    ],
)
def test_what_an_engine_can_run_is_accepted(made: EnginePlan) -> None:
    check_plan(made)


REFUSED: list[tuple[EnginePlan, str]] = [
    (
        made_of(ATTENTION, EXPERT, DRAFT),
        r"draft 0 \(--draft-nodes\): there is no draft model .*; give speculation one",
    ),
    (
        made_of(ATTENTION, EXPERT, DRAFT, replace(DRAFT, index=1), speculation=SELF),
        r"nodes: 2 draft nodes .* for 1 attention nodes: each of these asks one",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(DRAFT, device="cuda:0"), speculation=SELF),
        r"draft 0: device cuda:0, kernels cpu: these compute on the CPU only",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(DRAFT, device="cuda"), speculation=SELF),
        r"draft 0: device cuda: give its number, for example cuda:0",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(DRAFT, index=1), speculation=SELF),
        r"nodes: draft nodes have the indices \[1\], not 0",
    ),
    (changed(layers=(0, 4)), r"attention 0: layers \[0, 4\]: no stage computes the others"),
    (changed(address="tcp:h:1"), r".* address tcp:h:1, .*: nodes of one host find each other"),
    (changed(key="k"), r".* key k: nodes of one host find each other .* without keys"),
    (changed(device="gpu"), r".*: device gpu: must be cpu, cuda or cuda:N"),
    (changed(device="cuda", kernels="triton"), r".*: device cuda: .*for example cuda:0"),
    (changed(device="cuda:07", kernels="triton"), r".*: device cuda:07: .*for example cuda:7"),
    (
        changed(device="cuda:0", kernels="deterministic"),
        r".*, kernels deterministic: these compute on",
    ),
    (
        changed(kernels="triton", slow=1.5),
        r".*: slow 1\.5: only nodes .* the kernels triton",
    ),
    (changed(kv_cache_bytes=None), r".*: kv_cache_bytes: a node on the CPU needs a size"),
    (
        changed(max_num_batched_tokens=7),
        r".*: max_num_batched_tokens .* 7 is less than max_num_seqs .* 8",
    ),
    (changed(index=1), r"nodes: attention nodes have the indices \[1\], not 0, 1"),
    (made_of(ATTENTION, EXPERT, EXPERT), r"nodes: expert nodes have the indices \[0, 0\], not 0"),
    (made_of(EXPERT), r"nodes: an engine needs an attention node"),
    (replace(changed(), links=()), r"links: 0 of them; one link joins all"),
    (replace(changed(), links=(LINK, LINK)), r"links: 2 of them"),
    (
        made_of(replace(ATTENTION, cores=(0, 1)), replace(EXPERT, cores=(1, 2))),
        r"expert 0: core 1 belongs to attention 0 already",
    ),
    (changed(cores=(3, 3)), r"attention 0: core 3 belongs to attention 0 already"),
    (
        changed(link=replace(LINK, transport="cuda_ipc")),
        r"--transport cuda_ipc with attention on cpu and experts on cpu: it joins GPUs",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(EXPERT, index=1, **ON_GPU), link=LOCAL),
        r"--transport local .*expert nodes of one process compute on the same device",
    ),
    (on_one_gpu(link=replace(LOCAL, gbps=5.0)), r"links\[0\]: .* gbps 5\.0 with transport local"),
    (
        replace(
            changed(**ON_GPU),
            kv_cache=KvCacheSpec(layers=(KvLayerRule(layers=(0,), dtype="fp8"),)),
        ),
        r"kv_cache\.layers\[0\]\.dtype fp8: attention 0 has the kernels triton",
    ),
    (
        kept_as(KvLayerRule(layers=(0,))),
        r"kv_cache\.layers\[0\]: give a dtype, or retrieval, or both",
    ),
    (
        kept_as(KvLayerRule(layers=(0,), dtype="fp8"), KvLayerRule(layers=(1,), retrieval=False)),
        r"kv_cache\.layers\[1\]\.retrieval: kv_cache\.retrieval \(--kv-retrieval-tokens\)",
    ),
    (
        made_of(
            replace(ATTENTION, kernels="deterministic"),
            EXPERT,
            execution=ExecutionPolicy(deterministic=True),
        ),
        r"expert 0: kernels cpu with execution\.deterministic True",
    ),
    (cut(stage(0, (2, 3))), r"stage 0: layers \[2, 3\]: attention 0 ends at layer 1.* a gap"),
    (cut(stage(0, (0, 3))), r"stage 0: layers \[0, 3\]: .* at layer 1, so this is an overlap"),
    (
        cut(stage(0, (2, 3)), stage(1, (1, 2))),
        r"stage 0: layers \[2, 3\]: attention 0 ends at layer 1, so this is a gap",
    ),
    (
        cut(stage(0, (1, 3)), head=replace(HEAD, layers=(1, 2))),
        r"attention 0: layers \[1, 2\]: the model begins at layer 0, so this is a gap",
    ),
    (cut(stage(0, (1, 1))), r"stage 0: layers \[1, 1\]: there are none"),
    (cut(stage(0, None)), r"stage 0: it shares its layers with stages; give its layers"),
    (cut(stage(0, (1, 3)), head=ATTENTION), r"attention 0: it shares its layers"),
    (cut(stage(0, (1, 3), of=1)), r"stage 0: of 1: there is no such attention node"),
    (cut(stage(1, (1, 3))), r"nodes: stage nodes have the indices \[1\]"),
    (
        made_of(ATTENTION, replace(EXPERT, layers=(0, 1))),
        r"expert 0: layers \[0, 1\]: only attention nodes and stages",
    ),
    (
        growing(replace(ATTENTION, optional=True), OTHER, EXPERT),
        "nodes: every attention node is optional; an engine serves without these",
    ),
    (
        growing(ATTENTION, replace(EXPERT, optional=True)),
        "nodes: every expert node is optional; an engine serves without these",
    ),
    (
        growing(HEAD, stage(0, (1, 3), optional=True), EXPERT),
        "stage 0: optional: only attention and expert nodes can be",
    ),
    *(
        (spread(control), r"network\.control .* is not tcp")
        for control in ("", "10.0.0.1:7000", "tcp://h", "tcp://:7000", "tcp://h:0", "ipc://x:1")
    ),
]


@pytest.mark.parametrize(("made", "refusal"), REFUSED)
def test_what_no_engine_could_run_is_refused_by_name(made: EnginePlan, refusal: str) -> None:
    with pytest.raises(ConfigError, match=f"^{refusal}"):
        check_plan(made)
