"""Plans that do not fit a model, and plans that do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.structs import with_nodes
from tests.topspin.plan.nodes import (
    ATTENTION,
    EXPERT,
    made_of,
)
from tests.topspin.plans import DENSE, FACTS, plan
from topspin.errors import ConfigError
from topspin.plan.kv_cache import KvCacheSpec, KvLayerRule
from topspin.plan.local_experts import LocalExperts
from topspin.plan.precision import PrecisionRule, rules_of
from topspin.plan.retrieval import RetrievalPolicy, parse_spill
from topspin.plan.rules.checks import check_model, check_plan
from topspin.plan.rules.model_facts import ModelFacts
from topspin.plan.settings import FailoverPolicy
from topspin.plan.spec import EnginePlan


def holding(*nodes: tuple[int, bool]) -> EnginePlan:
    """Return a plan of expert nodes: how many experts each holds, and whether it is optional."""
    experts = [
        replace(EXPERT, index=idx, experts=count, optional=optional)
        for idx, (count, optional) in enumerate(nodes)
    ]
    return made_of(ATTENTION, *experts, failover=FailoverPolicy(restart=True))


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


def on_triton() -> EnginePlan:
    """Return a plan whose nodes are on a GPU."""
    made = plan()
    nodes = (
        msgspec.structs.replace(each, device="cuda:0", kernels="triton") for each in made.nodes
    )
    return msgspec.structs.replace(made, nodes=tuple(nodes))


MISFITS: list[tuple[EnginePlan, ModelFacts, str]] = [
    (with_experts(8, 9), FACTS, r"^expert 1: experts 9: the model has 8 per layer"),
    (
        with_experts(5, 2),
        FACTS,
        r"^nodes: expert nodes hold 5 \+ 2 experts per layer of the .* 8, ",
    ),
    (with_experts(), FACTS, r"^nodes: no expert node for a model with 8 routed experts"),
    (with_experts(4, 4), DENSE, r"^nodes: 2 expert nodes for a dense model"),
    (
        plan(),
        FACTS._replace(max_positions=2047),
        r"^model\.max_model_len .* 2048: the .* up to 2047",
    ),
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
        r"^precision\[0\] .*kernels cpu of the attention nodes have int8, int4, mxfp4",
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
    (
        plan(kv_retrieval_tokens=96),
        FACTS._replace(head_dim=20),
        r"^kv_cache\.retrieval .* 20 numbers",
    ),
    (
        on_triton(),
        FACTS._replace(head_dim=640, latent_rank=576),
        r"^attention 0: kernels triton: .* of 512 \+ 64 numbers, .* 576 \+ 64; .* CPUs",
    ),
    (
        on_triton(),
        FACTS._replace(head_dim=320),
        r"^attention 0: kernels triton: .* heads of 256 numbers, not of 320",
    ),
    (
        plan(kv_retrieval_tokens=96),
        FACTS._replace(head_dim=576, latent_rank=512),
        r"^kv_cache\.retrieval .*: latents, which are the keys of all heads, are not coded",
    ),
    (
        plan(kv_retrieval_tokens=96),
        FACTS._replace(windows=(8, 8, 8)),
        r"^kv_cache\.retrieval .*: all layers of the model have a window",
    ),
    (
        plan(kv_retrieval_tokens=96, kv_spill=parse_spill("/tmp:1GiB")),
        FACTS._replace(windows=(None, 40, 8)),
        r"^kv_cache\.spill .*: the model has layers with a window of 40 tokens",
    ),
]


@pytest.mark.parametrize(("made", "facts", "refusal"), MISFITS)
def test_a_plan_for_another_model_is_refused_by_the_field(
    made: EnginePlan, facts: ModelFacts, refusal: str
) -> None:
    check_plan(made)
    with pytest.raises(ConfigError, match=refusal):
        check_model(made, facts)


def test_kernels_of_gpus_attend_to_latents_of_deepseek() -> None:
    check_model(on_triton(), FACTS._replace(head_dim=576, latent_rank=512))


def test_layers_may_be_local() -> None:
    check_model(with_local(1, 2), FACTS)
    check_model(with_local(1, when="always"), FACTS)
    always = with_local(1, 2, when="always")
    check_model(msgspec.structs.replace(always, nodes=tuple(always.attention)), FACTS)


def test_expert_nodes_may_be_unequal_and_hold_copies() -> None:
    for held in ((8,), (7, 1), (8, 3), (2, 2, 2, 2)):
        check_model(with_experts(*held), FACTS)


def test_the_others_hold_every_expert() -> None:
    for held in (((8, False), (1, True)), ((3, True), (4, False), (4, False))):
        check_model(holding(*held), FACTS)
    refusal = r"^nodes: expert nodes that are not optional hold 4 \+ 3 .* the model's 8, "
    with pytest.raises(ConfigError, match=refusal):
        check_model(holding((4, False), (8, True), (3, False)), FACTS)
