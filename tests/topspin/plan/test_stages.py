"""Plans whose attention nodes' layers are cut: who has which layer."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.topspin.plan.nodes import ATTENTION, EXPERT, HEAD, cut, made_of, stage
from tests.topspin.plans import FACTS
from topspin.errors import ConfigError
from topspin.plan.rules.checks import check_model, check_plan
from topspin.plan.settings import SchedulingPolicy
from topspin.plan.stages import Stage, senders


def test_each_layer_has_one_sender_per_attention_node() -> None:
    second = replace(ATTENTION, index=1)
    third = replace(ATTENTION, index=2, layers=(0, 2))
    stages = stage(0, (1, 2)), stage(1, (2, 3), of=2), stage(2, (2, 3))
    plan = made_of(HEAD, second, third, *stages, EXPERT)
    check_plan(plan)
    found = plan.layer_ranges
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


@pytest.mark.parametrize("end", [2, 4])
def test_the_last_stage_ends_with_the_model(end: int) -> None:
    plan = cut(stage(0, (1, end)), scheduling=SchedulingPolicy(prefix_caching=False))
    check_plan(plan)
    with pytest.raises(ConfigError, match=rf"stage 0: layers \[1, {end}\]: the model has 3 layers"):
        check_model(plan, FACTS)
    check_model(cut(stage(0, (1, 3))), FACTS)
