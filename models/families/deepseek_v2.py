"""DeepSeek-V2 and V2-Lite: latents, a softmax router that may choose by groups, shared experts."""

from __future__ import annotations

from models.description.config_fields import ConfigFields
from models.description.parts import RouterConfig
from models.families.family import (
    Family,
    FamilyParts,
    check_groups,
    dense_first,
    latent_parts,
    read_shared_experts,
    read_top_k,
    serve_only,
)


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    # transformers follows none of them but mlp_bias, which shared experts have too.
    served = {"scoring_func": "softmax", "moe_layer_freq": 1, "norm_topk_prob": False}
    serve_only(fields, {**served, "mlp_bias": False})
    return latent_parts(
        fields,
        dense_first(fields, num_layers),
        read_shared_experts(fields, _router),
        rope_is_interleaved=True,
    )


def _router(fields: ConfigFields, num_experts: int) -> RouterConfig:
    method = fields.raw.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", "supported: greedy, group_limited_greedy")
    has_groups = method == "group_limited_greedy"
    router = RouterConfig(
        top_k=read_top_k(fields, num_experts),
        renormalise=False,
        num_groups=fields.positive_int("n_group") if has_groups else 1,
        top_groups=fields.positive_int("topk_group") if has_groups else 1,
        best_of_group=1,
        scale=fields.number("routed_scaling_factor"),
        fp32_logits=True,
    )
    check_groups(fields, num_experts, router)
    return router


FAMILY = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    defaults={
        "vocab_size": 102_400,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "num_experts": 64,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    parts=_parts,
)
