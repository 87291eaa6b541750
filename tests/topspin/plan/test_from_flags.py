"""Settings become a plan: every "auto" concrete, what cannot be refused by its flag."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.structs import with_nodes
from tests.topspin.plans import DENSE, FACTS, plan
from topspin.cores import LayoutChoice
from topspin.errors import ConfigError, TopspinError
from topspin.plan.from_flags import ModelFacts, check_model
from topspin.plan.kv_cache import KvCacheSpec, KvLayerRule
from topspin.plan.local_experts import LocalExperts
from topspin.plan.precision import PrecisionRule, rules_of
from topspin.plan.retrieval import RetrievalPolicy
from topspin.plan.settings import (
    BalanceSection,
    CacheSection,
    ComputeSection,
    FailoverSection,
    GatewaySection,
    M2NSection,
    ModelSection,
    SchedulerSection,
    SpeculationSection,
    TopologySection,
    TraceSection,
)
from topspin.plan.spec import (
    AttentionNode,
    DraftNode,
    EnginePlan,
    ExpertNode,
    LinkSpec,
    PlannedModel,
)
from topspin.plan.speculation import CACHED_TOKENS_PER_SEQUENCE, Speculation


def test_every_auto_becomes_concrete() -> None:
    made = plan()
    assert made.model == PlannedModel(path="tiny", dtype="bfloat16", max_model_len=2048)
    assert made.link == LinkSpec(transport="shm", payload="bf16", window_rows=512)
    assert made.nodes == (
        AttentionNode(
            index=0,
            device="cpu",
            kernels="cpu",
            wait="block",
            max_num_seqs=64,
            max_num_batched_tokens=512,
            kv_cache_bytes=256 * 2**20,
        ),
        ExpertNode(index=0, device="cpu", kernels="cpu", wait="block", experts=8),
    )
    assert made.scheduling.micro_batches is None  # measured while serving
    assert made.scheduling.prefix_caching
    assert made.precision == ()


def test_what_is_asked_for_is_in_the_plan() -> None:
    failover, trace = FailoverSection(restart_deadline_s=7.0), TraceSection(enabled=False)
    made = plan(
        model=ModelSection(path="x", dtype="float32", max_model_len=100, quantization="int8"),
        topology=TopologySection(attention_nodes=2, expert_nodes=3),
        scheduler=SchedulerSection(max_num_seqs=7, micro_batches=3, max_queued_requests=0),
        cache=CacheSection(block_size=32, kv_cache_bytes=2**20),
        m2n=M2NSection(
            transport="tcp",
            payload="int8",
            wait="spin",
            window_rows=70,
            link_latency_us=5.0,
            link_gbps=25.0,
            deadline_s=9.0,
        ),
        compute=ComputeSection(num_threads=2, spin_count=11, recordings=False),
        balance=BalanceSection(redundant_experts=2, interval_s=7.0),
        failover=failover,
        trace=trace,
    )
    assert made.model == PlannedModel(path="x", dtype="float32", max_model_len=100)
    assert made.precision == rules_of("int8")
    assert made.kv_cache.block_size == 32
    for node in made.attention:
        assert (node.max_num_seqs, node.max_num_batched_tokens) == (7, 512)
        assert node.kv_cache_bytes == 2**20
    assert {(node.num_threads, node.wait) for node in made.nodes} == {(2, "spin")}
    assert [node.experts for node in made.experts] == [3, 3, 4]  # with 2 second copies
    assert made.link == LinkSpec(
        transport="tcp", payload="int8", window_rows=70, latency_us=5.0, gbps=25.0, deadline_s=9.0
    )
    assert (made.scheduling.micro_batches, made.scheduling.max_queued_requests) == (3, 0)
    assert (made.execution.spin_count, made.execution.recordings) == (11, False)
    assert made.balance.interval_s == 7.0
    assert made.trace == trace
    assert (made.failover.restart, made.failover.restart_deadline_s) == (True, 7.0)


def test_draft_nodes_have_room_for_all_who_ask_them() -> None:
    speculation = SpeculationSection(config=Speculation(method="draft_model", model="m"))
    scheduler = SchedulerSection(max_num_seqs=3)
    made = plan(
        topology=TopologySection(attention_nodes=3, draft_nodes=2),
        speculation=speculation,
        scheduler=scheduler,
        compute=ComputeSection(num_threads=1),
    )
    node = DraftNode(
        index=0,
        device="cpu",
        kernels="cpu",
        wait="block",
        num_threads=1,
        kv_cache_tokens=2 * 3 * CACHED_TOKENS_PER_SEQUENCE,
    )
    assert made.drafts == [node, msgspec.structs.replace(node, index=1)]
    alone = plan(
        topology=TopologySection(draft_nodes=1),
        speculation=speculation,
        scheduler=SchedulerSection(max_num_seqs=1),
    )
    assert alone.drafts[0].kv_cache_tokens == 2048, "the longest text fits"
    assert plan(speculation=speculation).drafts == []
    beside_gpu = plan(
        topology=TopologySection(draft_nodes=1),
        speculation=speculation,
        compute=ComputeSection(attention_device="cuda"),
        model=ModelSection(path="x", max_model_len=100),
    )
    (draft,) = beside_gpu.drafts
    assert (draft.device, draft.kernels) == ("cpu", "cpu")
    assert draft.kv_cache_tokens == 256 * 100, "a GPU's steps have more requests"


def test_a_measured_layout_is_what_auto_means() -> None:
    choice = LayoutChoice("split", "tcp", 3)
    made = plan(measured=choice)
    assert made.link.transport == "tcp"
    assert [(n.cores, n.num_threads, n.wait) for n in made.nodes] == [
        ((0, 1), 3, "spin"),
        ((2, 3), 3, "spin"),
    ]
    told = plan(measured=choice, compute=ComputeSection(layout="shared", num_threads=2))
    assert {(node.cores, node.num_threads) for node in told.nodes} == {((), 2)}


def test_a_split_gives_each_process_cores_of_its_own() -> None:
    split = ComputeSection(layout="split")
    made = plan(topology=TopologySection(expert_nodes=2), compute=split)
    assert [node.cores for node in made.nodes] == [(0,), (1,), (2, 3)]
    alone = plan(compute=split, m2n=M2NSection(transport="local"))
    assert [node.cores for node in alone.nodes] == [(), ()]
    with pytest.raises(ConfigError, match="--layout split: 2 nodes on 1 cores"):
        plan(compute=split, cores=(0,))


@pytest.mark.parametrize(
    ("checkpoint", "dtype", "payload"),
    [
        ("float32", "float32", "fp32"),
        ("bfloat16", "bfloat16", "bf16"),
        ("float16", "bfloat16", "bf16"),
    ],
)
def test_auto_dtype_follows_the_checkpoint(checkpoint: str, dtype: str, payload: str) -> None:
    made = plan(FACTS._replace(dtype=checkpoint))
    assert (made.model.dtype, made.link.payload) == (dtype, payload)


def test_prefixes_are_not_shared_where_keys_depend_on_the_length() -> None:
    assert not plan(FACTS._replace(shares_prefixes=False)).scheduling.prefix_caching


def test_gpus_run_larger_batches_in_larger_windows_and_size_their_caches() -> None:
    compute = ComputeSection(attention_device="cuda:0", expert_device="cuda:1")
    made = plan(compute=compute, cache=CacheSection(gpu_memory_utilization=0.5))
    [node] = made.attention
    assert (node.max_num_seqs, node.max_num_batched_tokens) == (256, 8192)
    assert (node.kv_cache_bytes, node.gpu_memory_utilization) == (None, 0.5)
    assert (made.link.transport, made.link.window_rows) == ("cuda_ipc", 2048)
    assert made.scheduling.micro_batches == 2
    assert plan(compute=compute, m2n=M2NSection(window_rows=70)).link.window_rows == 70


def test_every_node_has_its_own_device_and_kernels() -> None:
    made = plan(
        topology=TopologySection(attention_nodes=2, expert_nodes=2),
        compute=ComputeSection(attention_device="cuda", expert_device="cuda:03"),
    )
    assert made.link.transport == "shm"  # kernels of two processes on one GPU should not wait
    assert [node.place for node in made.nodes] == [
        (device, "triton") for device in ("cuda:0", "cuda:1", "cuda:3", "cuda:3")
    ]
    other = plan(compute=ComputeSection(kernels="triton", expert_kernels="cpu"))
    assert [node.kernels for node in other.nodes] == ["triton", "cpu"]


def test_plain_torch_on_a_gpu_is_not_recorded() -> None:
    compute = ComputeSection(kernels="reference", attention_device="cuda")
    assert not plan(compute=compute).execution.recordings
    assert plan(compute=ComputeSection(kernels="reference")).execution.recordings


def test_two_streams_have_two_micro_batches_unless_told() -> None:
    compute = ComputeSection(attention_device="cuda", expert_device="cuda", gpu_streams=2)
    assert plan(compute=compute).scheduling.micro_batches == 2
    told = SchedulerSection(micro_batches=3)
    assert plan(compute=compute, scheduler=told).scheduling.micro_batches == 3


def test_deterministic_chooses_its_kernels() -> None:
    made = plan(compute=ComputeSection(deterministic=True))
    assert {node.kernels for node in made.nodes} == {"deterministic"}
    assert made.execution.deterministic


def test_a_dense_model_has_no_expert_nodes() -> None:
    made = plan(DENSE, topology=TopologySection(attention_nodes=2, expert_nodes=1))
    assert [node.role for node in made.nodes] == ["attention", "attention"]
    fp8 = ModelSection(path="x", quantization="fp8")
    plan(DENSE, model=fp8, compute=ComputeSection(attention_device="cuda"))


@pytest.mark.parametrize(
    "sections",
    [
        {"topology": TopologySection(expert_nodes=8)},
        {
            "topology": TopologySection(expert_nodes=3),
            "balance": BalanceSection(redundant_experts=16),
        },
        {"scheduler": SchedulerSection(max_num_batched_tokens=64, micro_batches=4)},
        {"model": ModelSection(path="x", max_model_len=2048)},
    ],
)
def test_the_limits_themselves_are_allowed(sections: dict[str, Any]) -> None:
    plan(**sections)


GPU = ComputeSection(attention_device="cuda")
REFUSED: list[tuple[ModelFacts, dict[str, Any], str]] = [
    (FACTS, {"topology": TopologySection(expert_nodes=0)}, "--expert-nodes 0: must be between"),
    (FACTS, {"topology": TopologySection(expert_nodes=9)}, "--expert-nodes 9: the model has 8"),
    (DENSE, {"topology": TopologySection(expert_nodes=2)}, "--expert-nodes 2: a dense model"),
    (FACTS, {"balance": BalanceSection(redundant_experts=1)}, "--redundant-experts 1: 1 expert n"),
    (
        FACTS,
        {
            "topology": TopologySection(expert_nodes=3),
            "balance": BalanceSection(redundant_experts=17),
        },
        "--redundant-experts 17: 3 expert nodes hold 16",
    ),
    (
        FACTS,
        {"scheduler": SchedulerSection(max_num_batched_tokens=63)},
        "--max-num-batched-tokens 63 is less than --max-num-seqs 64",
    ),
    (
        FACTS,
        {"model": ModelSection(path="x", max_model_len=2049)},
        "--max-model-len 2049: the model has positions up to 2048",
    ),
    (FACTS, {"gateway": GatewaySection(port=70000)}, "--port 70000: must be between 0 and 65535"),
    (
        FACTS,
        {"compute": ComputeSection(kernels="reference", deterministic=True)},
        "--deterministic with compute.kernels reference",
    ),
    (
        FACTS,
        {"compute": ComputeSection(kernels="deterministic")},
        "compute.kernels deterministic: the nodes' answers",
    ),
    (
        FACTS,
        {"compute": msgspec.structs.replace(GPU, deterministic=True)},
        "--deterministic: only the kernels for the CPU",
    ),
    (
        FACTS,
        {"compute": msgspec.structs.replace(GPU, kernels="cpu")},
        "compute.kernels cpu: a GPU has none of these",
    ),
    (
        FACTS,
        {"compute": GPU, "m2n": M2NSection(transport="cuda_ipc")},
        "--transport cuda_ipc with attention on cuda:0 and experts on cpu: it joins GPUs",
    ),
    (
        FACTS,
        {
            "model": ModelSection(path="x", quantization="int4"),
            "compute": ComputeSection(kernels="reference"),
        },
        "--quantization int4: precision[0] {format: int4}: the kernels reference of the attention",
    ),
    (
        FACTS,
        {"model": ModelSection(path="x", quantization="fp8"), "compute": GPU},
        "--quantization fp8: precision[0] {format: fp8}: the kernels cpu of the expert nodes have",
    ),
]


@pytest.mark.parametrize(("facts", "sections", "refusal"), REFUSED)
def test_what_cannot_be_is_refused_by_its_flag(
    facts: ModelFacts, sections: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(facts, **sections)
    assert str(raised.value).startswith(refusal)
    assert isinstance(raised.value, TopspinError)


def with_experts(*held: int) -> EnginePlan:
    [attention, expert] = plan().nodes
    nodes = [msgspec.structs.replace(expert, index=i, experts=n) for i, n in enumerate(held)]
    return msgspec.structs.replace(plan(), nodes=(attention, *nodes))


def with_local(*layers: int, when: Any = "measured", **fields: Any) -> EnginePlan:
    """Return the default plan with layers to keep local, and other fields of attention nodes."""
    made = with_nodes(plan(), "attention", **fields)
    local = LocalExperts(layers=layers, when=when)
    return msgspec.structs.replace(made, local_experts=local)


def with_layer(**fields: Any) -> EnginePlan:
    """Return a plan that sets something for layer 2."""
    kept = KvCacheSpec(
        retrieval=RetrievalPolicy(num_tokens=512), layers=(KvLayerRule(layers=(2,), **fields),)
    )
    return msgspec.structs.replace(plan(), kv_cache=kept)


MISFITS: list[tuple[EnginePlan, ModelFacts, str]] = [
    (with_experts(8, 9), FACTS, r"^expert 1: experts 9: the model has 8 per layer"),
    (with_experts(5, 2), FACTS, r"^nodes: expert nodes hold 5 \+ 2 experts per layer of the .* 8$"),
    (with_experts(), FACTS, r"^nodes: no expert node for a model with 8 routed experts"),
    (with_experts(4, 4), DENSE, r"^nodes: 2 expert nodes for a dense model"),
    (plan(), FACTS._replace(max_positions=2047), r"^model\.max_model_len 2048: the .* up to 2047"),
    (plan(), FACTS._replace(shares_prefixes=False), r"^scheduling\.prefix_caching: this model"),
    (with_local(2, 1), FACTS, r"^local_experts\.layers \[2, 1\]: must ascend"),
    (with_local(3), FACTS, r"^local_experts\.layers: layer 3 has no .* them in 1 to 2"),
    (with_local(1), FACTS._replace(moe_layers=(0, 2)), r"^local_experts\.layers: layer 1 .* 0, 2$"),
    (with_local(1), DENSE._replace(moe_layers=()), r"^nodes: 1 expert nodes for a dense model"),
    (
        with_local(1, 2, when="always"),
        FACTS,
        r"^local_experts: .* 1 expert nodes would have nothing to do; leave them out",
    ),
    (
        msgspec.structs.replace(with_local(1, 2), nodes=tuple(plan().attention)),
        FACTS,
        r"^local_experts: without expert nodes every MoE layer must be always local",
    ),
    (
        msgspec.structs.replace(
            with_local(1, kernels="reference"),
            precision=(PrecisionRule(format="int8", part="experts"),),
        ),
        FACTS,
        r"^local_experts: attention 0 is to hold experts in int8, .* kernels reference do not have",
    ),
    (
        msgspec.structs.replace(plan(), precision=(PrecisionRule(format="int8", layers=(3,)),)),
        FACTS,
        r"^precision\[0\] .*: the model has layers 0 to 2",
    ),
    (
        msgspec.structs.replace(plan(), precision=rules_of("fp8")),
        FACTS,
        r"^precision\[0\] .*kernels cpu of the attention nodes have int8 and int4",
    ),
    (
        with_layer(dtype="fp8"),
        FACTS._replace(num_layers=2),
        r"^kv_cache\.layers\[0\]: layer 2: the model has layers 0 to 1",
    ),
    (
        with_layer(retrieval=True),
        FACTS._replace(windows=(None, None, 40)),
        r"^kv_cache\.layers\[0\]\.retrieval: layer 2 has a window of 40 tokens",
    ),
]


@pytest.mark.parametrize(("made", "facts", "refusal"), MISFITS)
def test_a_plan_for_another_model_is_refused_by_the_field(
    made: EnginePlan, facts: ModelFacts, refusal: str
) -> None:
    made.check()
    with pytest.raises(ConfigError, match=refusal):
        check_model(made, facts)


def test_layers_may_be_local() -> None:
    check_model(with_local(1, 2), FACTS)
    check_model(with_local(1, when="always"), FACTS)
    always = with_local(1, 2, when="always")
    check_model(msgspec.structs.replace(always, nodes=tuple(always.attention)), FACTS)


def test_expert_nodes_may_be_unequal_and_hold_copies() -> None:
    for held in ((8,), (7, 1), (8, 3), (2, 2, 2, 2)):
        check_model(with_experts(*held), FACTS)
