"""GGUF's names of architectures, metadata and tensors, and what they are in a HuggingFace model.

Owns the table of the architectures that are read, and a config.json made of their metadata: every
field of the metadata and every tensor has a meaning here, or is refused by name. Reads no tensor
but the factors of Llama 3's rotation. Called by models.sources.gguf_checkpoint. Source: llama.cpp's
convert_hf_to_gguf.py and llama-model.cpp.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from gguf import ExpertGatingFuncType

from models.checkpoints.tensor_names import EMBED, FINAL_NORM, LM_HEAD, expert_name, layer_name
from models.description.config_fields import ConfigFields
from models.description.parts import USUAL_NAMES, ExpertNames
from models.families import FAMILIES, gpt_oss, minimax_m2
from models.families.family import SHARED_EXPERTS
from models.families.mixtral import EXPERTS
from models.quantised.scheme import GGUF_SCHEMES
from models.sources.gguf_file import GgufFile, GgufTensor
from topspin.errors import ConfigError

_PLAIN: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
TYPES: Final = (*_PLAIN, *GGUF_SCHEMES)
"""The types of tensors that are read."""


class _Architecture(NamedTuple):
    """One architecture: its `model_type`, the names of experts, fields and tensors of its own.

    is_interleaved: neighbouring numbers of a head are rotated together, for which the converter has
    put the rows of queries and keys in that order. `normalises`: what llama.cpp's code does with
    the weights of the chosen experts, whatever the metadata says; None: what the metadata says.
    `parts` are names of tensors without, and `alone` with their ends (".weight"); `fields` are
    metadata beside _FIELDS, `absent` options that the metadata may lack, with llama.cpp's values.
    `rotated` is the option of how many numbers of a head are rotated, or of which share; "": all
    are. has_latents: keys and values are made of latents.
    """

    model_type: str
    normalises: bool | None = None
    experts: ExpertNames = USUAL_NAMES
    is_interleaved: bool = False
    parts: Mapping[str, str] = MappingProxyType({})
    alone: Mapping[str, str] = MappingProxyType({})
    fields: Mapping[str, str] = MappingProxyType({})
    absent: Mapping[str, Any] = MappingProxyType({})
    scores: ExpertGatingFuncType = ExpertGatingFuncType.SOFTMAX
    rotated: Literal["", "rotary_dim", "partial_rotary_factor"] = ""
    has_latents: bool = False


_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORM: Final = {"post_attention_norm": "post_attention_layernorm"}
_MTP_PARTS: Final = {
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_MTP_LAYERS: Final = "nextn_predict_layers"
_SCORE_BIAS: Final = "exp_probs_b.bias"
# Of GLM-4.5 and DeepSeek-V3.
_SHARED_FIELDS: Final = {
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    _MTP_LAYERS: "num_nextn_predict_layers",
}
# Matrices per head between latents and keys, and values, are in one tensor in older files.
_LATENT_PARTS: Final = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_KV_RANK: Final = "attention.kv_lora_rank"
_KEY_SIZE: Final = "attention.key_length_mla"
_VALUE_SIZE: Final = "attention.value_length_mla"
_DEEPSEEK_V2: Final = _Architecture(
    "deepseek_v2",
    experts=SHARED_EXPERTS,
    parts={**_LATENT_PARTS, **_MTP_PARTS},
    fields={**_SHARED_FIELDS, "attention.q_lora_rank": "q_lora_rank"},
    absent={
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    has_latents=True,
)
_DEEPSEEK_V3: Final = _DEEPSEEK_V2._replace(
    model_type="deepseek_v3",
    alone={_SCORE_BIAS: f"mlp.{SHARED_EXPERTS.bias}"},
    scores=ExpertGatingFuncType.SIGMOID,
)
_ARCHITECTURES: Final[Mapping[str, _Architecture]] = {
    "deepseek2": _DEEPSEEK_V2,
    "glm4moe": _Architecture(
        "glm4_moe",
        experts=SHARED_EXPERTS,
        parts={**_NORMS, **_POST_NORM, **_MTP_PARTS},
        alone={_SCORE_BIAS: f"mlp.{SHARED_EXPERTS.bias}"},
        fields=_SHARED_FIELDS,
        scores=ExpertGatingFuncType.SIGMOID,
        rotated="partial_rotary_factor",
    ),
    "gpt-oss": _Architecture(
        "gpt_oss",
        experts=gpt_oss.NAMES,
        parts=_POST_NORM,
        alone={"attn_sinks.weight": "self_attn.sinks"},
        fields={"attention.sliding_window": "sliding_window"},
    ),
    "llama": _Architecture("llama", is_interleaved=True),
    "minimax-m2": _Architecture(
        "minimax_m2",
        experts=minimax_m2.NAMES,
        parts=_NORMS,
        alone={_SCORE_BIAS: f"{minimax_m2.NAMES.blocks[0]}.{minimax_m2.NAMES.bias}"},
        scores=ExpertGatingFuncType.SIGMOID,
        rotated="rotary_dim",
    ),
    "olmoe": _Architecture("olmoe", normalises=False, parts=_NORMS),
    "qwen2moe": _Architecture("qwen2_moe", normalises=False),
    "qwen3moe": _Architecture("qwen3_moe", normalises=True, parts=_NORMS),
}
# Of the architecture `llama` where the metadata has experts.
_MIXTRAL: Final = _Architecture("mixtral", experts=EXPERTS, is_interleaved=True)

_FIELDS: Final[Mapping[str, str]] = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.clamp_kqv": "clip_qkv",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_REQUIRED: Final = (
    *("context_length", "block_count", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.layer_norm_rms_epsilon"),
)
_ROPE: Final[Mapping[str, str]] = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_ROPE_TYPE: Final = "rope.scaling.type"
_LOG_MULTIPLIER: Final = "rope.scaling.yarn_log_multiplier"
_FREQUENCIES: Final = "rope_freqs.weight"
_PARTS: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BIASED: Final = ("attn_q", "attn_kv_a_mqa")
_WHOLE: Final = {
    "token_embd.weight": EMBED,
    "output_norm.weight": FINAL_NORM,
    "output.weight": LM_HEAD,
}
_OF_LAYER: Final = re.compile(r"blk\.(\d+)\.([a-z_.]+)\.(weight|bias)")


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return config.json of the model in `file`, but for its special tokens.

    Raises ConfigError naming what is missing, or not read: an architecture, a field, a type.
    """
    own = _architecture(file)
    fields = file.fields(f"{file.architecture}.")
    for name in _REQUIRED:
        if name not in fields.raw:
            raise ConfigError(f"{fields.source}: has no {name}")
    embedding = file.tensor("token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [FAMILIES[own.model_type].architecture],
        "model_type": own.model_type,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "dtype": _dtype(file),
        "attention_bias": any(f"blk.0.{each}.bias" in file.tensors for each in _BIASED),
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        **own.absent,
        **{name: fields.raw[of] for of, name in _fields(own).items() if of in fields.raw},
        "rope_scaling": _rope_scaling(file, fields, own),
    }
    config["num_hidden_layers"] -= fields.raw.get(_MTP_LAYERS, 0)
    if own.model_type == "gpt_oss":
        config["rope_scaling"] = {**(config["rope_scaling"] or {}), "truncate": False}
    num_rotated = fields.optional_int("rope.dimension_count")
    if own.rotated and num_rotated is not None:
        share = num_rotated / fields.positive_int("attention.key_length")
        config[own.rotated] = num_rotated if own.rotated == "rotary_dim" else share
    if own.has_latents:
        config |= _latent_sizes(fields)
    if own is _DEEPSEEK_V2 and config["n_group"] > 1:
        config["topk_method"] = "group_limited_greedy"
    if own.is_interleaved:
        config["gguf_rope_interleave"] = True
    if own.normalises is not None:
        config["norm_topk_prob"] = own.normalises
    if any(each.type in GGUF_SCHEMES for each in file.tensors.values()):
        config["quantization_config"] = {"quant_method": "gguf"}
    _check_rest(fields, own, config)
    return config


def named_tensors(file: GgufFile) -> dict[str, GgufTensor]:
    """Return the tensors by HuggingFace's names, each routed expert's matrices of their own.

    Raises ConfigError naming a tensor that the architecture does not have, or of a type that is not
    among TYPES.
    """
    own = _architecture(file)
    found: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        if tensor.type not in TYPES:
            raise ConfigError(
                f"{file.path}: tensor {name} is {tensor.type}; supported: {', '.join(TYPES)}"
            )
        if name in _WHOLE:
            found[_WHOLE[name]] = tensor
        elif name != _FREQUENCIES:
            found.update(_of_layer(file, own, name, tensor))
    return found


def _fields(own: _Architecture) -> dict[str, str]:
    """Return the fields of the metadata that are options of config.json, by their names there."""
    return {**_FIELDS, **own.fields}


def _architecture(file: GgufFile) -> _Architecture:
    found = _ARCHITECTURES.get(file.architecture)
    if found is None:
        raise ConfigError(
            f"{file.path}: general.architecture = {file.architecture!r}: supported: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if found is _DEEPSEEK_V2 and any(name.endswith(_SCORE_BIAS) for name in file.tensors):
        return _DEEPSEEK_V3
    is_mixtral = file.architecture == "llama" and file.get("llama.expert_count", 0) > 0
    return _MIXTRAL if is_mixtral else found


def _of_layer(
    file: GgufFile, own: _Architecture, name: str, tensor: GgufTensor
) -> Iterator[tuple[str, GgufTensor]]:
    """Yield a layer's tensor by its name, or a matrix for each expert."""
    match = _OF_LAYER.fullmatch(name)
    layer, stem, kind = (int(match[1]), match[2], match[3]) if match else (0, name, "")
    block, names = own.experts.blocks[0], own.experts
    parts = {**_PARTS, **own.parts}
    parts["ffn_gate_inp"] = f"{block}.{names.router}"
    for part in ("gate", "up", "down"):
        parts[f"ffn_{part}_shexp"] = f"{block}.{names.shared}.{part}_proj"
    stacked = {
        "ffn_gate_exps": names.gate,
        "ffn_up_exps": names.up,
        "ffn_down_exps": names.down,
    }
    if f"{stem}.{kind}" in own.alone:
        yield layer_name(layer, own.alone[f"{stem}.{kind}"]), tensor
    elif stem in parts:
        if own.has_latents and len(tensor.shape) == 3:  # heads' matrices
            heads, rows, columns = tensor.shape
            tensor = tensor._replace(shape=(heads * rows, columns))
        yield layer_name(layer, f"{parts[stem]}.{kind}"), tensor
    elif stem == "ffn_gate_inp_shexp":
        # A row, which GGUF stores as a vector.
        row = tensor._replace(shape=(1, tensor.shape[-1]))
        yield layer_name(layer, f"{block}.{names.shared}_gate.{kind}"), row
    elif stem in stacked and len(tensor.shape) == (3 if kind == "weight" else 2):
        size = tensor.size_bytes // tensor.shape[0]
        for idx in range(tensor.shape[0]):
            own_name = expert_name(
                layer, block=block, expert_id=idx, projection=stacked[stem], kind=kind
            )
            offset = tensor.offset_bytes + idx * size
            yield own_name, GgufTensor(tensor.type, tensor.shape[1:], offset, size)
    else:
        raise ConfigError(
            f"{file.path}: tensor {name} is not one of those that are read of the architecture "
            f"{file.architecture}"
        )


def _dtype(file: GgufFile) -> str:
    """Return the dtype of most numbers of matrices; bfloat16 where most are in blocks.

    Vectors and routers are always in fp32.
    """
    sizes: Counter[str] = Counter()
    for name, tensor in file.tensors.items():
        if len(tensor.shape) > 1 and "ffn_gate_inp" not in name:
            sizes[_PLAIN.get(tensor.type, "bfloat16")] += tensor.size_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="float32")


def _latent_sizes(fields: ConfigFields) -> dict[str, Any]:
    """Return the options of sizes; older files have those of heads where others have latents'."""
    key = fields.positive_int("attention.key_length")
    value = fields.positive_int("attention.value_length")
    rotated = fields.positive_int("rope.dimension_count")
    return {
        "kv_lora_rank": fields.positive_int(_KV_RANK),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": fields.positive_int(_KEY_SIZE, default=key) - rotated,
        "v_head_dim": fields.positive_int(_VALUE_SIZE, default=value),
    }


def _rope_scaling(
    file: GgufFile, fields: ConfigFields, own: _Architecture
) -> dict[str, Any] | None:
    """Return config.json's object of that name; None: positions are not scaled."""
    kind = fields.raw.get(_ROPE_TYPE, "none")
    given = {_ROPE[name]: fields.raw[name] for name in _ROPE if name in fields.raw}
    if own.has_latents and _LOG_MULTIPLIER in fields.raw:
        # A tenth of the option, which llama.cpp takes for both.
        weight = round(10 * fields.number(_LOG_MULTIPLIER), 6)
        given |= {"mscale": weight, "mscale_all_dim": weight}
    if kind not in ("none", "linear", "yarn"):
        raise fields.error(_ROPE_TYPE, "supported: none, linear, yarn")
    if _FREQUENCIES in file.tensors:
        if kind != "none":
            raise fields.error(_ROPE_TYPE, f"supported: none, beside the tensor {_FREQUENCIES}")
        return _llama_3_scaling(file, fields)
    return None if kind == "none" else {"rope_type": kind, **given}


def _llama_3_scaling(file: GgufFile, fields: ConfigFields) -> dict[str, Any]:
    """Return the options whose factors of wave lengths are those of `rope_freqs.weight`.

    The converter computes them of options that it does not write. Published checkpoints differ in
    `factor`, which is the largest one, and in the original length, a power of two.
    """
    factors = file.read(_FREQUENCIES)
    theta = fields.number("rope.freq_base", default=10_000.0)
    longest = fields.positive_int("context_length")
    dim = 2 * len(factors)
    lengths = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    factor = float(factors.max())
    low, high = 1.0, 4.0
    for original in (1 << power for power in range(3, longest.bit_length() + 1)):
        smooth = np.clip((original / lengths - low) / (high - low), 0.0, 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(factors, expected, rtol=1e-5):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ConfigError(
        f"{file.path}: tensor {_FREQUENCIES}: supported: the factors of rope_type llama3 with "
        f"low_freq_factor {low}, high_freq_factor {high} and a power of two as original length"
    )


def _check_rest(fields: ConfigFields, own: _Architecture, config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field of the metadata with a meaning that is not computed."""
    heads = fields.positive_int("attention.head_count")
    head_dim = config.get("head_dim", fields.positive_int("embedding_length") // heads)
    num_rotated = fields.raw.get("rope.dimension_count")
    known: dict[str, object] = {
        "vocab_size": config["vocab_size"],
        "attention.value_length": head_dim,
        "rope.dimension_count": num_rotated if own.rotated or own.has_latents else head_dim,
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.finetuned": fields.raw.get("rope.scaling.finetuned"),
        "expert_weights_norm": own.normalises,
        "expert_gating_func": own.scores,
        "attention.causal": True,
    }
    read = {*_fields(own), *_ROPE, _ROPE_TYPE}
    if own.has_latents:
        read |= {_KV_RANK, _KEY_SIZE, _VALUE_SIZE, _LOG_MULTIPLIER}
        is_old = _VALUE_SIZE not in fields.raw
        known["attention.value_length"] = config["v_head_dim" if is_old else "kv_lora_rank"]
    for name, value in fields.raw.items():
        if name in read:
            continue
        if name in known:
            if value != known[name]:
                raise fields.error(name, f"supported: {known[name]}")
        else:
            raise fields.error(name, "the field is not read, and may change what is computed")
