"""Plans whose attention nodes' layers are cut: who has which layer, and cuts that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.topspin.plan.test_spec import ATTENTION, EXPERT, LINK, LOCAL, ON_GPU, SELF, made_of
from tests.topspin.plans import FACTS
from topspin.errors import ConfigError
from topspin.plan.from_flags import check_model
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.local_experts import LocalExperts
from topspin.plan.retrieval import policy_of
from topspin.plan.settings import SchedulingPolicy
from topspin.plan.spec import EnginePlan, StageNode
from topspin.plan.stages import Stage, senders, stages_of


def stage(index: int, layers: tuple[int, int] | None, *, of: int = 0, **fields: Any) -> StageNode:
    return StageNode(
        index=index,
        device="cpu",
        kernels="cpu",
        wait="block",
        of=of,
        layers=layers,
        kv_cache_bytes=2**18,
        **fields,
    )


HEAD = replace(ATTENTION, layers=(0, 1))


def cut(*stages: StageNode, head: Any = HEAD, **fields: Any) -> EnginePlan:
    return made_of(head, *stages, EXPERT, **fields)


def test_each_layer_has_one_sender_per_attention_node() -> None:
    second = replace(ATTENTION, index=1)
    third = replace(ATTENTION, index=2, layers=(0, 2))
    stages = stage(0, (1, 2)), stage(1, (2, 3), of=2), stage(2, (2, 3))
    plan = made_of(HEAD, second, third, *stages, EXPERT)
    plan.check()
    found = stages_of(plan.stages)
    assert found == (Stage(0, 1, 2), Stage(2, 2, 3), Stage(0, 2, 3))
    assert senders(found, num_attention=3, layers=(0, 1, 2)) == ((0, 1, 2), (3, 1, 2), (5, 1, 4))
    assert senders((), num_attention=2, layers=(1,)) == ((0, 1),)


def test_a_stage_gets_the_limits_of_its_attention_node_and_its_own_cache() -> None:
    second = replace(ATTENTION, index=1, max_num_seqs=4, layers=(0, 2))
    plan = made_of(ATTENTION, second, stage(0, (2, 3), of=1), EXPERT)
    config = plan.for_node("stage", 0)
    assert config.attention == replace(second, kv_cache_bytes=2**18)
    assert config.stages == (Stage(1, 2, 3),)
    # Each attention node, and the stage, sends rows to the expert node.
    assert plan.for_node("expert", 0).num_attention == 3


@pytest.mark.parametrize(
    ("plan", "message"),
    [
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
            r"transport local: stages pass rows on",
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
    ],
)
def test_what_no_engine_could_run_is_refused(plan: EnginePlan, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan.check()


@pytest.mark.parametrize("end", [2, 4])
def test_the_last_stage_ends_with_the_model(end: int) -> None:
    plan = cut(stage(0, (1, end)), scheduling=SchedulingPolicy(prefix_caching=False))
    plan.check()
    with pytest.raises(ConfigError, match=rf"stage 0: layers \[1, {end}\]: the model has 3 layers"):
        check_model(plan, FACTS)
    check_model(cut(stage(0, (1, 3))), FACTS)
