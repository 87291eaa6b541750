"""The engine plan: its nodes, each one's part, and the plans that no engine could run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.topspin.plans import DENSE, plan
from topspin.errors import ConfigError
from topspin.plan.kv_cache import KvCacheSpec, KvLayerRule
from topspin.plan.precision import rules_of
from topspin.plan.retrieval import RetrievalPolicy, SpillSpec
from topspin.plan.settings import (
    BalancePolicy,
    ComputeSection,
    ExecutionPolicy,
    FailoverSection,
    GatewaySection,
    M2NSection,
    SchedulerSection,
    SchedulingPolicy,
    TopologySection,
    TraceSection,
)
from topspin.plan.spec import (
    AttentionNode,
    DraftNode,
    EnginePlan,
    ExpertNode,
    LinkSpec,
    ServeConfig,
    load_serve_config,
)
from topspin.plan.speculation import Speculation

ATTENTION = AttentionNode(
    index=0,
    device="cpu",
    kernels="cpu",
    wait="block",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    kv_cache_bytes=2**20,
)
EXPERT = ExpertNode(index=0, device="cpu", kernels="cpu", wait="block", experts=8)
DRAFT = DraftNode(index=0, device="cpu", kernels="cpu", wait="block", kv_cache_tokens=99)
SELF = Speculation(method="draft_model", model="self-int4")
LINK = LinkSpec(transport="shm", payload="bf16", window_rows=32)
LOCAL = replace(LINK, transport="local")
ON_GPU: dict[str, Any] = {"device": "cuda:0", "kernels": "triton"}


def made_of(*nodes: Any, link: LinkSpec = LINK, **fields: Any) -> EnginePlan:
    return EnginePlan(model=plan().model, nodes=nodes, links=(link,), **fields)


def on_one_gpu(*, link: LinkSpec = LOCAL, **fields: Any) -> EnginePlan:
    nodes = replace(ATTENTION, **ON_GPU, **fields), replace(EXPERT, **ON_GPU)
    return made_of(*nodes, link=link, execution=ExecutionPolicy(gpu_streams=2))


def changed(*, link: LinkSpec = LINK, **fields: Any) -> EnginePlan:
    """Return a plan whose attention node has these `fields`."""
    return made_of(replace(ATTENTION, **fields), EXPERT, link=link)


def kept_as(*rules: KvLayerRule, **fields: Any) -> EnginePlan:
    """Return a plan with settings of single layers."""
    return replace(changed(), kv_cache=KvCacheSpec(layers=rules, **fields))


def test_nodes_are_found_by_role_and_index() -> None:
    second = replace(ATTENTION, index=1, max_num_seqs=4)
    made = made_of(EXPERT, ATTENTION, second)
    made.check()
    assert made.attention == [ATTENTION, second]
    assert made.experts == [EXPERT]
    assert made.for_node("attention", 1).node == made.for_node("attention", 1).attention == second
    assert made.for_node("expert").node == EXPERT
    assert [str(node) for node in made.nodes] == ["expert 0", "attention 0", "attention 1"]
    with pytest.raises(AssertionError, match="expert 0 is no attention node"):
        _ = made.for_node("expert").attention


def test_attention_nodes_share_draft_nodes_by_index() -> None:
    attention = [replace(ATTENTION, index=index) for index in range(3)]
    drafts = [replace(DRAFT, index=index, address=f"ipc:{index}") for index in range(2)]
    made = made_of(*attention, EXPERT, *drafts, speculation=SELF)
    assert made.drafts == drafts
    assert made.for_node("draft", 1).draft == drafts[1]
    found = [made.for_node("attention", index).draft_address for index in range(3)]
    assert found == ["ipc:0", "ipc:1", "ipc:0"]
    assert made_of(ATTENTION, EXPERT).for_node("attention").draft_address is None
    with pytest.raises(AssertionError, match="expert 0 is no draft node"):
        _ = made.for_node("expert").draft


def test_every_node_gets_the_parts_that_it_shares() -> None:
    made = replace(
        plan(topology=TopologySection(attention_nodes=2), m2n=M2NSection(link_gbps=5.0)),
        precision=rules_of("int8"),
        kv_cache=KvCacheSpec(block_size=32),
        scheduling=SchedulingPolicy(micro_batches=3),
        failover=FailoverSection(restart=True),
        trace=TraceSection(enabled=False),
        execution=ExecutionPolicy(spin_count=7),
    )
    for config in (made.for_node("attention", 1), made.for_node("expert")):
        for section in ("model", "precision", "kv_cache", "link", "execution", "trace"):
            assert getattr(config, section) == getattr(made, section)
        assert (config.num_attention, config.num_experts) == (2, 1)
        assert (config.micro_batches, config.restart) == (3, True)
        assert not hasattr(config, "nodes")


@pytest.mark.parametrize(
    ("tokens", "link", "window", "rows"),
    [
        ((64,), LINK, 32, 32),
        ((64, 24), LINK, 32, 56),  # a window of each attention node at once
        ((16, 24), LINK, 24, 40),  # no window is larger than any node's step
        ((64, 24), LOCAL, 32, 64),  # one process serves one attention node after the other
    ],
)
def test_windows_and_batches_follow_the_nodes(
    tokens: tuple[int, ...], link: LinkSpec, window: int, rows: int
) -> None:
    nodes = [
        replace(ATTENTION, index=i, max_num_batched_tokens=count) for i, count in enumerate(tokens)
    ]
    config = made_of(*nodes, EXPERT, link=link).for_node("expert")
    assert (config.link.window_rows, config.batch_rows) == (window, rows)


def test_one_process_on_one_device_shares_it() -> None:
    cuda = ComputeSection(attention_device="cuda", expert_device="cuda")
    assert plan(compute=cuda).shares_device
    assert plan(compute=cuda).for_node("expert").shares_device
    for other in (
        plan(m2n=M2NSection(transport="local")),
        plan(compute=cuda, m2n=M2NSection(transport="cuda_ipc")),
        plan(compute=ComputeSection(attention_device="cuda"), m2n=M2NSection(transport="local")),
        plan(DENSE, compute=cuda, m2n=M2NSection(transport="local")),
    ):
        assert not other.shares_device


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
    made.check()


REFUSED: list[tuple[EnginePlan, str]] = [
    (made_of(ATTENTION, EXPERT, DRAFT), r"draft 0: there is no draft model; give speculation one"),
    (
        made_of(ATTENTION, EXPERT, DRAFT, replace(DRAFT, index=1), speculation=SELF),
        r"nodes: 2 draft nodes for 1 attention nodes: each of these asks one",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(DRAFT, device="cuda:0"), speculation=SELF),
        r"nodes\[2\] \(draft 0\): kernels cpu compute on the CPU only",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(DRAFT, device="cuda"), speculation=SELF),
        r"nodes\[2\] \(draft 0\): device cuda: give its number, for example cuda:0",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(DRAFT, **ON_GPU, cores=(1,)), speculation=SELF),
        r"nodes\[2\] \(draft 0\): cores: a node on a GPU needs none",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(DRAFT, index=1), speculation=SELF),
        r"nodes: draft nodes have the indices \[1\], not 0",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(DRAFT, address="ipc:x"), speculation=SELF),
        r"nodes\[2\] \(draft 0\): address 'ipc:x': nodes of one host find each other",
    ),
    (changed(tp=2), r"nodes\[0\] \(attention 0\): tp 2: a node is one device .*leave it at 1"),
    (changed(layers=(0, 4)), r"attention 0: layers \[0, 4\]: no stage computes the others"),
    (changed(phases="decode"), r".*: phases 'decode': a node serves prefill and .*at both"),
    (changed(host="node7"), r".*: host 'node7': all nodes run on this host .*at localhost"),
    (changed(address="tcp:h:1"), r".*: address 'tcp:h:1': nodes of one host find each other"),
    (changed(key="k"), r".*: key 'k': nodes of one host need no keys"),
    (changed(device="gpu"), r".*: device gpu: must be cpu, cuda or cuda:N"),
    (changed(device="cuda", kernels="triton"), r".*: device cuda: .*for example cuda:0"),
    (changed(device="cuda:07", kernels="triton"), r".*: device cuda:07: .*for example cuda:7"),
    (changed(device="cuda:0"), r".*: kernels cpu compute on the CPU only"),
    (changed(device="cuda:0", kernels="deterministic"), r".*: kernels deterministic compute on"),
    (changed(**ON_GPU, cores=(1,)), r".*: cores: a node on a GPU needs none of its own"),
    (changed(**ON_GPU, slow=2.0), r".*: slow 2: only nodes that compute on the CPU"),
    (
        changed(kernels="triton", slow=1.5),
        r".*: slow 1\.5: only nodes .* the kernels triton",
    ),
    (changed(kv_cache_bytes=None), r".*: kv_cache_bytes: a node on the CPU needs a size"),
    (changed(max_num_batched_tokens=7), r".*: max_num_batched_tokens 7 is less than max_num_seqs"),
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
    (changed(cores=(0, 1), link=LOCAL), r"attention 0: cores \[0, 1\]: all nodes are one process"),
    (
        made_of(replace(ATTENTION, num_threads=2), EXPERT, link=LOCAL),
        r"expert 0: num_threads None: .*one process, and attention 0 has num_threads 2",
    ),
    (
        changed(link=replace(LINK, transport="cuda_ipc")),
        r"--transport cuda_ipc with attention on cpu and experts on cpu: it joins GPUs",
    ),
    (
        made_of(ATTENTION, EXPERT, replace(EXPERT, index=1, **ON_GPU), link=LOCAL),
        r"--transport local .*expert nodes of one process compute on the same device",
    ),
    (on_one_gpu(link=replace(LOCAL, payload="fp8")), r"links\[0\]: payload fp8 with transport loc"),
    (on_one_gpu(link=replace(LOCAL, gbps=5.0)), r"links\[0\]: gbps 5\.0 with transport local"),
    (on_one_gpu(wait="spin"), r"attention 0: wait spin with transport local: .*no such thing"),
    (
        made_of(
            replace(ATTENTION, **ON_GPU),
            replace(EXPERT, **ON_GPU),
            link=replace(LINK, transport="cuda_ipc", latency_us=2.5),
        ),
        r"links\[0\]: latency_us 2\.5 with transport cuda_ipc",
    ),
    (
        made_of(
            replace(ATTENTION, kernels="deterministic"),
            replace(EXPERT, kernels="deterministic"),
            execution=ExecutionPolicy(deterministic=True),
            kv_cache=KvCacheSpec(retrieval=RetrievalPolicy(num_tokens=512)),
        ),
        r"kv_cache\.retrieval .*: attention 0 has the kernels deterministic, which attend to all",
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
        r"kv_cache\.spill .*: attention 0 has the kernels reference; only cpu",
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
        r"attention 0: kernels deterministic with execution\.det.*f",
    ),
    (
        made_of(
            replace(ATTENTION, kernels="deterministic"),
            EXPERT,
            execution=ExecutionPolicy(deterministic=True),
        ),
        r"expert 0: kernels cpu with execution\.deterministic true",
    ),
    (
        replace(changed(), scheduling=SchedulingPolicy(micro_batches=5)),
        r"scheduling\.micro_batches 5: must be between 1 and 4",
    ),
    (replace(changed(), balance=BalancePolicy(min_gain=-1)), r"balance\.min_gain -1: must be"),
]


@pytest.mark.parametrize(("made", "refusal"), REFUSED)
def test_what_no_engine_could_run_is_refused_by_name(made: EnginePlan, refusal: str) -> None:
    with pytest.raises(ConfigError, match=f"^{refusal}"):
        made.check()


def test_processes_read_the_plan_and_the_gateways_settings(tmp_path: Path) -> None:
    made = plan(scheduler=SchedulerSection(micro_batches=2))
    config = ServeConfig(plan=made, gateway=GatewaySection(port=7))
    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode(config))
    assert load_serve_config(str(file)) == config


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "truncated"),
        (b"{}", "plan"),
        (b'{"plan": {"colour": 1}}', "colour"),
        (b"\xff\xfe", "malformed"),
        (b'{"plan": {"model": {"path": "\xff"}}}', "utf-8"),
        (None, "No such file"),
    ],
)
def test_a_damaged_configuration_is_refused(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--config {file}: .*{reason}"):
        load_serve_config(str(file))
