"""The reference ops against the modules of transformers that they replace."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.llama.modeling_llama import (
    LlamaConfig,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts, OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts, Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from kernels import reference
from kernels.contracts import Routing, RoutingRule
from tests.kernels.cases.matrices import values_then_pairs
from tests.pairwise import cover_pairs
from topspin.expert_activation import ExpertActivation

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "shape"), values_then_pairs(DTYPES, [(0, 8), (7, 37), (1, 576), (3, 5, 64)])
)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = (torch.randn(shape) * 3).to(dtype)
    wanted = norm(x).detach()
    weight = norm.weight.detach()
    assert torch.equal(reference.rms_norm(x, weight, eps=1e-5), wanted)
    out = torch.empty_like(x)
    assert reference.rms_norm(x, weight, eps=1e-5, out=out) is out
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_updates_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(s).to(dtype) for s in ((4, 33), (4, 33), (33,)))
    total = x + residual
    normed = reference.add_rms_norm(x, residual, weight, eps=1e-6)
    assert torch.equal(residual, total)
    assert torch.equal(normed, reference.rms_norm(total, weight, eps=1e-6))


@pytest.mark.parametrize(
    ("dtype", "half_tables", "head_dim"), cover_pairs(DTYPES, [True, False], [64, 80])
)
def test_rotate(head_dim: int, half_tables: bool, dtype: torch.dtype) -> None:
    angles = torch.rand(5, head_dim // 2) * 100
    angles = torch.cat((angles, angles), -1)
    qkv = torch.randn(5, 6, head_dim).to(dtype)
    q, k, rest = qkv[:, :3], qkv[:, 3:5], qkv[:, 5:].clone()
    wanted = apply_rotary_pos_emb(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        angles.cos().to(dtype)[None],
        angles.sin().to(dtype)[None],
    )
    width = head_dim // 2 if half_tables else head_dim
    reference.rotate(q, k, angles.cos()[:, :width], angles.sin()[:, :width])
    assert torch.equal(q, wanted[0][0].transpose(0, 1))
    assert torch.equal(k, wanted[1][0].transpose(0, 1))
    assert torch.equal(qkv[:, 5:], rest)


@pytest.mark.parametrize("bias", [False, True])
def test_dense_mlp(bias: bool) -> None:
    config = LlamaConfig(hidden_size=20, num_attention_heads=2, intermediate_size=13, mlp_bias=bias)
    mlp = LlamaMLP(config).requires_grad_(False)
    x = torch.randn(6, 20)
    gate_up = reference.pack_linear(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
    down = reference.pack_linear(mlp.down_proj.weight)
    biases = (
        {
            "gate_up_bias": torch.cat((mlp.gate_proj.bias, mlp.up_proj.bias)),
            "down_bias": mlp.down_proj.bias,
        }
        if bias
        else {}
    )
    out = torch.empty(6, 20)
    assert reference.dense_mlp(x, gate_up, down, **biases, out=out) is out
    torch.testing.assert_close(out, mlp(x), rtol=1e-5, atol=1e-6)


def test_embed() -> None:
    table, tokens = torch.randn(9, 4), torch.tensor([3, 3, 0])
    assert torch.equal(reference.embed(tokens, table), F.embedding(tokens, table))
    out = torch.empty(3, 4)
    assert reference.embed(tokens, table, out=out) is out
    assert torch.equal(out, table[[3, 3, 0]])


class Family(NamedTuple):
    """A family's router and experts, and the arguments of `route` for it."""

    router: type
    experts: type
    config: object
    renormalise: bool
    rounds_weights: bool


SIZES = {"hidden_size": 24, "num_experts_per_tok": 3}
FAMILIES = {
    "mixtral": Family(
        MixtralTopKRouter,
        MixtralExperts,
        MixtralConfig(intermediate_size=10, num_local_experts=7, **SIZES),
        renormalise=True,
        rounds_weights=False,
    ),
    "qwen2": Family(
        Qwen2MoeTopKRouter,
        Qwen2MoeExperts,
        Qwen2MoeConfig(moe_intermediate_size=10, num_experts=7, norm_topk_prob=False, **SIZES),
        renormalise=False,
        rounds_weights=True,
    ),
    "qwen3": Family(
        Qwen3MoeTopKRouter,
        Qwen3MoeExperts,
        Qwen3MoeConfig(moe_intermediate_size=10, num_experts=7, norm_topk_prob=True, **SIZES),
        renormalise=True,
        rounds_weights=True,
    ),
    "olmoe": Family(
        OlmoeTopKRouter,
        OlmoeExperts,
        OlmoeConfig(intermediate_size=10, num_experts=7, norm_topk_prob=False, **SIZES),
        renormalise=False,
        rounds_weights=True,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_routes_as_transformers(name: str, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    router = family.router(family.config).to(dtype).requires_grad_(False)
    router.weight.normal_()
    x = torch.randn(50, 24).to(dtype)
    logits, weights, experts = router(x)
    rule = RoutingRule(
        3,
        renormalise=family.renormalise,
        weights_dtype=dtype if family.rounds_weights else torch.float32,
    )
    routing = reference.route(logits, rule)
    assert routing.experts.dtype == torch.int64
    assert routing.weights.dtype == torch.float32
    # torch does not specify the order of equal ones.
    is_told = torch.tensor([len({*row}) == len(row) for row in logits.tolist()])
    assert is_told.sum() > 20
    assert torch.equal(routing.experts[is_told], experts[is_told])
    assert torch.equal(routing.weights[is_told], weights.float()[is_told])


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (2, 1), (6, 5)])
def test_routes_by_sigmoids_as_transformers(
    num_groups: int, top_groups: int, renormalise: bool
) -> None:
    config = Glm4MoeConfig(
        hidden_size=24,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=num_groups,
        topk_group=top_groups,
        norm_topk_prob=renormalise,
        routed_scaling_factor=2.5,
    )
    router = Glm4MoeTopkRouter(config).requires_grad_(False)
    router.weight.normal_()
    router.e_score_correction_bias.normal_()
    logits, weights, experts = router(torch.randn(50, 24))
    rule = RoutingRule(
        3,
        scores="sigmoid",
        bias=router.e_score_correction_bias,
        num_groups=num_groups,
        top_groups=top_groups,
        renormalise=renormalise,
        epsilon=1e-20,
        scale=2.5,
    )
    _assert_same_pairs(reference.route(logits, rule), experts, weights)


def test_routes_as_minimax() -> None:
    config = MiniMaxM2Config(hidden_size=24, num_local_experts=12, num_experts_per_tok=3)
    router = MiniMaxM2TopKRouter(config).requires_grad_(False)
    router.weight.normal_()
    bias = torch.randn(12)
    logits, weights, experts = router(torch.randn(50, 24), bias)
    rule = RoutingRule(3, scores="sigmoid", bias=bias, renormalise=True)
    _assert_same_pairs(reference.route(logits, rule), experts, weights)


def test_routes_by_softmax_with_a_bias_as_ernie() -> None:
    """The bias may choose experts whose weights are too small to be divided by."""
    config = Ernie4_5_MoeConfig(hidden_size=24, moe_num_experts=12, moe_k=3, moe_norm_min=0.01)
    router = Ernie4_5_MoeTopKRouter(config).requires_grad_(False)
    router.weight.normal_()
    bias = router.moe_statics.e_score_correction_bias.normal_()
    logits, weights, experts = router(torch.randn(50, 24))
    assert 5 < (weights.sum(-1) < 0.99).sum() < 45
    rule = RoutingRule(3, bias=bias[0], renormalise=True, least_sum=0.01)
    _assert_same_pairs(reference.route(logits, rule), experts, weights)


def test_routes_by_the_logits_of_the_chosen_as_gpt_oss() -> None:
    config = GptOssConfig(hidden_size=24, num_local_experts=12, num_experts_per_tok=3)
    router = GptOssTopKRouter(config).requires_grad_(False)
    router.weight.normal_()
    logits, weights, experts = router(torch.randn(50, 24))
    _assert_same_pairs(reference.route(logits, RoutingRule(3, scores="logits")), experts, weights)


def test_of_equal_experts_and_groups_the_lowest_are_chosen() -> None:
    rule = RoutingRule(
        2, scores="sigmoid", bias=torch.tensor([0.0, 0, 5, 0, 0, 5]), num_groups=3, top_groups=1
    )
    assert reference.route(torch.zeros(1, 6), rule).experts.tolist() == [[2, 3]]
    assert reference.route(torch.ones(2, 6), RoutingRule(3)).experts.tolist() == [[0, 1, 2]] * 2


def _assert_same_pairs(routing: Routing, experts: Tensor, weights: Tensor) -> None:
    """Compare with transformers' choices, which are in no special order."""
    order = experts.argsort(-1)
    own = routing.experts.argsort(-1)
    assert torch.equal(routing.experts.gather(1, own), experts.gather(1, order))
    torch.testing.assert_close(
        routing.weights.gather(1, own), weights.float().gather(1, order), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_compute_as_transformers(name: str) -> None:
    family = FAMILIES[name]
    block = family.experts(family.config).requires_grad_(False)
    block.gate_up_proj.normal_()
    block.down_proj.normal_()
    x = torch.randn(20, 24)
    routing = reference.route(torch.randn(20, 7), RoutingRule(3, renormalise=family.renormalise))
    packed = reference.pack_experts(block.gate_up_proj, block.down_proj)
    result = reference.grouped_mlp(x, routing.experts.int(), routing.weights, packed)
    wanted = block(x, routing.experts, routing.weights)
    torch.testing.assert_close(result.out, wanted, rtol=1e-5, atol=1e-4)
    assert torch.equal(result.counts, torch.bincount(routing.experts.flatten(), minlength=7))


GPT_OSS = GptOssConfig(
    hidden_size=24, intermediate_size=10, num_local_experts=7, num_experts_per_tok=3
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_routes_as_gpt_oss(dtype: torch.dtype) -> None:
    """Logits have a bias, and the weights are a softmax over those of the chosen experts."""
    router = GptOssTopKRouter(GPT_OSS).to(dtype).requires_grad_(False)
    for parameter in router.parameters():
        parameter.normal_()
    x = torch.randn(50, 24).to(dtype)
    logits, weights, experts = router(x)
    found = reference.linear(x, reference.pack_linear(router.weight), router.bias)
    assert torch.equal(found, logits)
    routing = reference.route(found, RoutingRule(3, scores="logits", weights_dtype=dtype))
    assert torch.equal(routing.experts, experts)
    assert torch.equal(routing.weights, weights.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_compute_as_gpt_oss(dtype: torch.dtype) -> None:
    """Its matrices are transposed, and rows of gate and up are in turn."""
    block = GptOssExperts(GPT_OSS).to(dtype).requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_()
    x, weights = torch.randn(20, 24).to(dtype), torch.rand(20, 3)
    experts = torch.rand(20, 7).argsort(-1)[:, :3]

    def gates_above_ups(rows: Tensor) -> Tensor:
        return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)

    packed = reference.pack_experts(
        gates_above_ups(block.gate_up_proj.transpose(1, 2)),
        block.down_proj.transpose(1, 2),
        biases=(gates_above_ups(block.gate_up_proj_bias), block.down_proj_bias),
        activation=ExpertActivation(1.702, offset=1.0, limit=7.0),
    )
    result = reference.grouped_mlp(x, experts.int(), weights, packed).out
    wanted = block(x, experts, weights.to(dtype))
    error = (result - wanted).float().norm() / wanted.float().norm()
    assert error < (1e-6 if dtype == torch.float32 else 1e-2)


def test_partial_sums_of_two_nodes_make_the_whole() -> None:
    gate_up, down = torch.randn(5, 12, 8), torch.randn(5, 8, 6)
    x, slots = torch.randn(9, 8), torch.stack([torch.randperm(5)[:2] for _ in range(9)]).int()
    weights = torch.rand(9, 2)
    whole = reference.grouped_mlp(x, slots, weights, reference.pack_experts(gate_up, down)).out
    first = reference.grouped_mlp(
        x,
        torch.where(slots < 2, slots, -1),
        weights,
        reference.pack_experts(gate_up[:2], down[:2]),
    ).out
    second = reference.grouped_mlp(
        x,
        torch.where(slots < 2, -5, slots - 2),
        weights,
        reference.pack_experts(gate_up[2:], down[2:]),
    ).out
    torch.testing.assert_close(first + second, whole, rtol=1e-5, atol=1e-4)
    nowhere = (slots >= 2).all(1)
    assert nowhere.any()
    assert not first[nowhere].any()


def test_permute_groups_in_order() -> None:
    slots = torch.tensor([[2, -1], [0, 2], [-1, -1], [2, 0]], dtype=torch.int32)
    groups = reference.permute(slots, 4)
    assert groups.counts.tolist() == [2, 0, 3, 0]
    assert groups.offsets.tolist() == [0, 2, 2, 5, 5]
    assert groups.order.tolist() == [2, 7, 0, 3, 6, 1, 4, 5]
    assert groups.row_of.tolist() == [1, 3, 0, 1, 3, 0, 2, 2]


def test_counts_add_up_with_experts_that_have_rows_and_batches() -> None:
    totals = torch.zeros(5, dtype=torch.int64)
    for counts in ([2, 0, 3], [0, 0, 0], [0, 0, 4]):
        reference.add_counts(totals, torch.tensor(counts))
    assert totals.tolist() == [2, 0, 7, 3, 2]


def test_permute_of_no_rows() -> None:
    groups = reference.permute(torch.empty(0, 2, dtype=torch.int32), 3)
    assert groups.order.numel() == 0
    assert groups.counts.tolist() == [0, 0, 0]
