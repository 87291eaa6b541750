"""Plans that no engine could run, or that do not fit a model, and plans that are in order."""

from __future__ import annotations

from pathlib import Path
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
from topspin.plan.checks import check_plan
from topspin.plan.combinations import CONFLICTS, conflicts_in, print_page
from topspin.plan.kv_cache import KvCacheSpec, KvLayerRule
from topspin.plan.local_experts import LocalExperts
from topspin.plan.network import NetworkSpec
from topspin.plan.retrieval import RetrievalPolicy, SpillSpec, policy_of
from topspin.plan.settings import ExecutionPolicy, FailoverPolicy
from topspin.plan.spec import EnginePlan, LinkSpec


def on_one_gpu(*, link: LinkSpec = LOCAL, **fields: Any) -> EnginePlan:
    nodes = replace(ATTENTION, **ON_GPU, **fields), replace(EXPERT, **ON_GPU)
    return made_of(*nodes, link=link, execution=ExecutionPolicy(gpu_streams=2))


def changed(*, link: LinkSpec = LINK, **fields: Any) -> EnginePlan:
    """Return a plan whose attention node has these `fields`."""
    return made_of(replace(ATTENTION, **fields), EXPERT, link=link)


def kept_as(*rules: KvLayerRule, **fields: Any) -> EnginePlan:
    """Return a plan with settings of single layers."""
    return replace(changed(), kv_cache=KvCacheSpec(layers=rules, **fields))


OTHER = replace(ATTENTION, index=1, optional=True)


def growing(*nodes: Any, restart: bool = True, **fields: Any) -> EnginePlan:
    return made_of(*nodes, failover=FailoverPolicy(restart=restart), **fields)


CONTROL = "tcp://10.0.0.1:7000"


def spread(transport: str = "tcp", *, trusted: bool = False, host: str = "10.0.0.2") -> EnginePlan:
    """Return a plan whose last node is on another host."""
    *nodes, last = with_nodes(plan(), host="10.0.0.1").nodes
    return replace(
        plan(transport=transport),
        nodes=(*nodes, replace(last, host=host)),
        network=NetworkSpec(control=CONTROL, trusted=trusted),
    )


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


def spilling(directory: str, **fields: Any) -> EnginePlan:
    spill = SpillSpec(directory=directory, size_bytes=1)
    fields = {"retrieval": policy_of(512), **fields}
    return replace(changed(), kv_cache=KvCacheSpec(spill=spill, **fields))


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
        made_of(ATTENTION, EXPERT, replace(DRAFT, **ON_GPU, cores=(1,)), speculation=SELF),
        r"draft 0: cores \(1,\): a node on a GPU needs none",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(DRAFT, index=1), speculation=SELF),
        r"nodes: draft nodes have the indices \[1\], not 0",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(DRAFT, address="ipc:x"), speculation=SELF),
        r"draft 0: .* address ipc:x, .*: nodes of one host find each other",
    ),
    (changed(layers=(0, 4)), r"attention 0: layers \[0, 4\]: no stage computes the others"),
    (changed(host="node7"), r"attention 0: host node7, .*leave them out, or give `network`"),
    (changed(address="tcp:h:1"), r".* address tcp:h:1, .*: nodes of one host find each other"),
    (changed(key="k"), r".* key k: nodes of one host find each other .* without keys"),
    (changed(device="gpu"), r".*: device gpu: must be cpu, cuda or cuda:N"),
    (changed(device="cuda", kernels="triton"), r".*: device cuda: .*for example cuda:0"),
    (changed(device="cuda:07", kernels="triton"), r".*: device cuda:07: .*for example cuda:7"),
    (changed(device="cuda:0"), r".*: device cuda:0, kernels cpu: these compute on the CPU only"),
    (
        changed(device="cuda:0", kernels="deterministic"),
        r".*, kernels deterministic: these compute on",
    ),
    (changed(**ON_GPU, cores=(1,)), r".*: cores \(1,\): a node on a GPU needs none of its own"),
    (changed(**ON_GPU, slow=2.0), r".*: slow 2: only nodes that compute on the CPU"),
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
        replace(changed(**ON_GPU), kv_cache=KvCacheSpec(dtype="fp8")),
        r"kv_cache\.dtype \(--kv-cache-dtype\) fp8: attention 0 has the kernels triton",
    ),
    (
        made_of(replace(ATTENTION, cores=(0, 1)), replace(EXPERT, cores=(1, 2))),
        r"expert 0: core 1 belongs to attention 0 already",
    ),
    (changed(cores=(3, 3)), r"attention 0: core 3 belongs to attention 0 already"),
    (changed(cores=(0, 1), link=LOCAL), r"attention 0: cores \(0, 1\): all nodes are one process"),
    (
        made_of(replace(ATTENTION, num_threads=2), EXPERT, link=LOCAL),
        r"expert 0: num_threads None, and attention 0 has num_threads 2: .* one process",
    ),
    (
        changed(link=replace(LINK, transport="cuda_ipc")),
        r"--transport cuda_ipc with attention on cpu and experts on cpu: it joins GPUs",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(EXPERT, index=1, **ON_GPU), link=LOCAL),
        r"--transport local .*expert nodes of one process compute on the same device",
    ),
    (
        on_one_gpu(link=replace(LOCAL, payload="fp8")),
        r"links\[0\]: payload fp8 .*with transport loc",
    ),
    (on_one_gpu(link=replace(LOCAL, gbps=5.0)), r"links\[0\]: .* gbps 5\.0 with transport local"),
    (on_one_gpu(wait="spin"), r"attention 0: wait spin with transport local: .*no such thing"),
    (
        made_of(
            replace(ATTENTION, **ON_GPU),
            replace(EXPERT, **ON_GPU),
            link=replace(LINK, transport="cuda_ipc", latency_us=2.5),
        ),
        r"links\[0\]: latency_us 2\.5, .* with transport cuda_ipc",
    ),
    (
        made_of(
            replace(ATTENTION, kernels="deterministic"),
            replace(EXPERT, kernels="deterministic"),
            execution=ExecutionPolicy(deterministic=True),
            kv_cache=KvCacheSpec(retrieval=RetrievalPolicy(num_tokens=512)),
        ),
        r"kv_cache\.retrieval .*: attention 0 has the kernels deterministic: these .* to all",
    ),
    (
        made_of(
            replace(ATTENTION, kernels="reference"),
            EXPERT,
            kv_cache=KvCacheSpec(
                retrieval=RetrievalPolicy(num_tokens=512),
                spill=SpillSpec(directory="/tmp", size_bytes=1),
            ),
        ),
        r"kv_cache\.spill .*: attention 0 has the kernels reference: only cpu",
    ),
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
        kept_as(
            KvLayerRule(layers=(0,), dtype="fp8"),
            retrieval=RetrievalPolicy(num_tokens=512),
            spill=SpillSpec(directory="/tmp", size_bytes=1),
        ),
        r"kv_cache\.layers: with kv_cache\.spill \(--kv-spill-dir\)",
    ),
    (on_one_gpu(link=LINK), r"execution\.gpu_streams 2: only attention and experts on one GPU"),
    (
        changed(kernels="deterministic"),
        r"attention 0: kernels deterministic with execution\.det.*F",
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
        cut(stage(0, (1, 3)), link=LOCAL),
        r"links\[0\]: transport local: stages pass rows on",
    ),
    (
        cut(stage(0, (1, 3)), speculation=SELF),
        r"stage 0: speculation: .* leave out",
    ),
    (
        cut(stage(0, (1, 3)), local_experts=LocalExperts(layers=(1,))),
        r"stage 0: local_experts: stages hold no routed experts",
    ),
    (
        cut(stage(0, (1, 3)), kv_cache=KvCacheSpec(retrieval=policy_of(1024))),
        r"stage 0: kv_cache\.retrieval: .* leave out retrieval",
    ),
    (
        cut(stage(0, (1, 3)), head=replace(HEAD, **ON_GPU), link=LINK),
        r"attention 0: device cuda:0.*: stages, and attention nodes that have some",
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
        growing(ATTENTION, OTHER, EXPERT, restart=False),
        r"attention 1: optional: nodes join late by failover\.restart",
    ),
    (
        growing(ATTENTION, OTHER, EXPERT, link=LOCAL),
        "attention 1: optional: with transport local all nodes are one process",
    ),
    (
        growing(ATTENTION, EXPERT, replace(DRAFT, optional=True), speculation=SELF),
        "draft 0: optional: only attention and expert nodes can be",
    ),
    (
        growing(HEAD, stage(0, (1, 3), optional=True), EXPERT),
        "stage 0: optional: only attention and expert nodes can be",
    ),
    (
        growing(ATTENTION, replace(OTHER, layers=(0, 1)), stage(0, (1, 3), of=1), EXPERT),
        "attention 1: optional: a stage computes layers of it",
    ),
    (spilling("/tmp", retrieval=None), r"kv_cache\.spill .*: without kv_cache\.retrieval"),
    (
        replace(spilling("/tmp"), speculation=replace(SELF, branches=True)),
        r"kv_cache\.spill .*: drafts that branch",
    ),
    (spilling("host"), r"kv_cache\.spill .*: attention 0 has the kernels cpu: only triton"),
    (
        replace(on_one_gpu(), local_experts=LocalExperts(layers=(1,))),
        r"local_experts: attention and experts share a device",
    ),
    (
        replace(plan(deterministic=True, payload="int8"), local_experts=LocalExperts(layers=(1,))),
        r"local_experts: links\[0\]\.payload int8: that payload rounds",
    ),
    *(
        (replace(spread(), network=NetworkSpec(control=control)), r"network\.control .* is not tcp")
        for control in ("", "10.0.0.1:7000", "tcp://h", "tcp://:7000", "tcp://h:0", "ipc://x:1")
    ),
    (
        spread("shm"),
        r"links\[0\]: transport shm: expert 0 is on 10\.0\.0\.2, .*use tcp",
    ),
    (spread("local"), r"links\[0\]: transport local: it joins threads"),
    (spread("nixl"), r"links\[0\]: transport nixl: .*no authentication; set network\.trusted"),
]


@pytest.mark.parametrize(("made", "refusal"), REFUSED)
def test_what_no_engine_could_run_is_refused_by_name(made: EnginePlan, refusal: str) -> None:
    with pytest.raises(ConfigError, match=f"^{refusal}"):
        check_plan(made)


def test_every_row_of_the_table_is_met_by_a_plan_that_is_else_in_order() -> None:
    met = [[row for row, _ in conflicts_in(made)] for made, _ in REFUSED if _is_well_formed(made)]
    alone = {id(rows[0]) for rows in met if len(set(map(id, rows))) == 1}
    assert [row.place for row in CONFLICTS if id(row) not in alone] == []


def _is_well_formed(made: EnginePlan) -> bool:
    return bool(made.attention and made.links)


def test_the_page_of_combinations_is_the_table() -> None:
    page = Path(__file__).parents[3] / "docs" / "combinations.md"
    assert page.read_text(encoding="utf-8") == print_page()
