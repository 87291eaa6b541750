"""GGUF files of tiny checkpoints, as llama.cpp's converter writes them, and the numbers in them.

The `gguf` library names, quantises and writes the tensors; transformers' checkpoint gets the same
numbers, dequantised, so that it is an oracle for what was written. Knows no module of Topspin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from tests.variants import VARIANTS

ARCHITECTURES = {
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
# The library does not know its heads of multi-token prediction.
_NAMED_AS = {gguf.MODEL_ARCH.DEEPSEEK2: gguf.MODEL_ARCH.GLM_DSA}
# With what a file cannot say: norms of latents have the epsilon of the others, and mscale is
# mscale_all_dim. Blocks of 32 divide all rows.
_LATENT = {
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}
_SCALED = {**VARIANTS["deepseek_v2_lite"].overrides["rope_parameters"], "mscale": 0.6}
LATENTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v2_lite": {**_LATENT, "q_lora_rank": None, "rope_parameters": _SCALED},
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)(\.weight|\.bias)")
_LARGE = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)


def write_gguf(
    checkpoint: Path,
    file: Path,
    kind: Kind = Kind.F32,
    *,
    pre: str = "gpt-2",
    splits_heads: bool = True,
    mixed: Mapping[str, Kind] = MappingProxyType({}),
    **metadata: Any,
) -> Path:
    """Write transformers' `checkpoint` as `file`, with matrices of a `kind`, and return it.

    `mixed` has the kinds of others by a part of their names. The checkpoint's matrices are replaced
    by the numbers that the file has. `metadata` has fields beside those of the converter by their
    names, or None for one that is left out. Without `splits_heads` matrices between latents and
    heads are in one tensor, as older files have them.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    num_layers = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    names = gguf.get_tensor_name_map(_NAMED_AS.get(architecture, architecture), num_layers)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    tensors = _with_single_experts(load_file(checkpoint / "model.safetensors"))
    if "kv_lora_rank" in config and splits_heads:
        tensors = _with_split_heads(tensors, config)
    elif "kv_lora_rank" in config:
        metadata = {**_of_old_latents(config), **metadata}
    _add_metadata(writer, config, metadata)
    _add_tokenizer(writer, checkpoint, pre)
    stacked: dict[str, list[Any]] = {}
    kinds: dict[str, Kind] = {}
    for name, tensor in sorted(tensors.items(), key=_by_expert):
        asked = next((mixed[part] for part in mixed if part in name), kind)
        data, own = _stored(name, tensor.numpy(), asked)
        tensors[name] = torch.from_numpy(np.array(gguf.quants.dequantize(data, own), np.float32))
        match = _EXPERT.fullmatch(name)
        if match:
            stacked.setdefault(f"{match[1]}.{match[3]}{match[4]}", []).append(data)
            kinds[f"{match[1]}.{match[3]}{match[4]}"] = own
            continue
        if architecture == gguf.MODEL_ARCH.LLAMA and re.search("[qk]_proj", name):
            is_query = "q_proj" in name
            data = _permuted(data, config[f"num_{'attention' if is_query else 'key_value'}_heads"])
        named = name.replace("e_score_correction_bias", "e_score_correction.bias")
        named = f"{named}.weight" if named.endswith(".sinks") else named
        written = str(names.get_name(named, try_suffixes=(".weight", ".bias")))
        writer.add_tensor(written, data.squeeze(0) if "expert_gate" in name else data, None, own)
    for name, matrices in stacked.items():
        written = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        writer.add_tensor(written, np.stack(matrices), None, kinds[name])
    tensors = _with_joined_heads(_with_joined_experts(tensors))
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    scaling = config.get("rope_parameters", {})
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama_3_factors(scaling, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _by_expert(item: tuple[str, Any]) -> tuple[str, int]:
    match = _EXPERT.fullmatch(item[0])
    return (f"{match[1]}.{match[3]}{match[4]}", int(match[2])) if match else (item[0], 0)


def _with_single_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Divide gpt-oss's tensors of all experts: gate and up in turn, matrices transposed."""
    found = dict(tensors)
    for name in [each for each in tensors if re.search(r"experts\.\w+_proj(_bias)?$", each)]:
        block, _, projection = name.rpartition(".")
        is_bias = projection.endswith("_bias")
        kind = "bias" if is_bias else "weight"
        for idx, whole in enumerate(found.pop(name)):
            rows = whole if is_bias else whole.T
            if "gate_up" in projection:
                found[f"{block}.{idx}.gate_proj.{kind}"] = rows[0::2].contiguous()
                found[f"{block}.{idx}.up_proj.{kind}"] = rows[1::2].contiguous()
            else:
                found[f"{block}.{idx}.down_proj.{kind}"] = rows.contiguous()
    return found


def _with_joined_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Undo _with_single_experts() where it has divided something: there are biases."""
    found = dict(tensors)
    single = [each for each in map(_EXPERT.fullmatch, tensors) if each]
    blocks = {match[1] for match in single if match[4] == ".bias"}
    for block in blocks:
        num_experts = 1 + max(int(match[2]) for match in single if match[1] == block)
        for kind, end in (("weight", ""), ("bias", "_bias")):
            parts = {
                part: [found.pop(f"{block}.{idx}.{part}_proj.{kind}") for idx in range(num_experts)]
                for part in ("gate", "up", "down")
            }
            gate_up = [
                torch.stack(pair, dim=1).flatten(0, 1)
                for pair in zip(parts["gate"], parts["up"], strict=True)
            ]
            for name, rows in (("gate_up", gate_up), ("down", parts["down"])):
                whole = torch.stack(rows)
                stored = whole if kind == "bias" else whole.transpose(1, 2).contiguous()
                found[f"{block}.{name}_proj{end}"] = stored
    return found


def _with_split_heads(tensors: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Divide what makes keys and values of latents by heads; keys' matrices are transposed."""
    found = dict(tensors)
    sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
    for name in [each for each in tensors if "kv_b_proj" in each]:
        whole = found.pop(name)
        heads = whole.view(-1, sum(sizes), whole.shape[1])
        keys, values = torch.split(heads, sizes, dim=1)
        found[name.replace("kv_b", "k_b")] = keys.transpose(1, 2).contiguous()
        found[name.replace("kv_b", "v_b")] = values.contiguous()
    return found


def _with_joined_heads(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Undo _with_split_heads()."""
    found = dict(tensors)
    for name in [each for each in tensors if ".k_b_proj" in each]:
        keys = found.pop(name).transpose(1, 2)
        values = found.pop(name.replace("k_b", "v_b"))
        found[name.replace("k_b", "kv_b")] = torch.cat((keys, values), dim=1).flatten(0, 1)
    return found


def _stored(name: str, values: Any, kind: Kind) -> tuple[Any, Kind]:
    """Return a tensor's data and kind: vectors, routers and odd rows stay in fp32."""
    is_router = name.endswith((".gate.weight", "expert_gate.weight", ".router.weight"))
    width, size = gguf.GGML_QUANT_SIZES[kind]
    if values.ndim < 2 or is_router or values.shape[-1] % width:
        return values, Kind.F32
    if kind not in _LARGE:
        return gguf.quants.quantize(values, kind), kind
    return _random_blocks(values, width, size, kind), kind


def _random_blocks(values: Any, width: int, size: int, kind: Kind) -> Any:
    """Return blocks of random codes, about as large as `values`: no library here chooses such."""
    rng = np.random.default_rng(values.size)
    blocks = (*values.shape[:-1], values.shape[-1] // width, size)
    found = rng.integers(0, 256, blocks, dtype=np.uint8)
    scale = np.float16(values.std() / 1500)
    if kind == Kind.Q6_K:
        found[..., -2:] = scale.reshape(1).view(np.uint8)
    else:
        found[..., :4] = np.array([4 * scale, 30 * scale], np.float16).view(np.uint8)
    return found.reshape(*values.shape[:-1], -1)


def _permuted(rows: Any, num_heads: int) -> Any:
    """Reorder rotary rows as the converter does: those half a head apart become neighbours."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _of_glm(config: dict[str, Any]) -> dict[str, Any]:
    num_heads = config.get("num_nextn_predict_layers", 0)
    return {
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "leading_dense_block_count": config["first_k_dense_replace"],
        "nextn_predict_layers": num_heads or None,
        "block_count": config["num_hidden_layers"] + num_heads,
    }


def _of_gpt_oss(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _of_minimax(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
    }


def _of_latents(config: dict[str, Any]) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    is_v2 = config["model_type"] == "deepseek_v2"
    scores = gguf.ExpertGatingFuncType
    weight = config["rope_parameters"].get("mscale_all_dim")
    dense = config.get("mlp_layer_types", []).count("dense")
    return {
        **_of_glm({"norm_topk_prob": False, "first_k_dense_replace": dense, **config}),
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": None if weight is None else 0.1 * weight,
        "expert_weights_norm": config.get("norm_topk_prob") or None,
        "expert_gating_func": int(scores.SOFTMAX if is_v2 else scores.SIGMOID),
    }


def _of_old_latents(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.head_count_kv": config["num_attention_heads"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "attention.value_length": config["v_head_dim"],
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }


_ADDED = {
    "deepseek_v2": _of_latents,
    "deepseek_v3": _of_latents,
    "glm4_moe": _of_glm,
    "glm4_moe_lite": _of_latents,
    "gpt_oss": _of_gpt_oss,
    "minimax_m2": _of_minimax,
}
"""Metadata of some architectures, by `model_type`."""


def _add_metadata(writer: Any, config: dict[str, Any], metadata: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": round(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": config["vocab_size"],
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "rope.freq_base": float(rope["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.clamp_kqv": config.get("clip_qkv"),
        **_ADDED.get(config["model_type"], lambda _: {})(config),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        fields |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        fields["rope.scaling.yarn_beta_fast"] = rope["beta_fast"]
        fields["rope.scaling.yarn_beta_slow"] = rope["beta_slow"]
    for name, value in {**fields, **metadata}.items():
        full = (
            name
            if name.startswith(("general.", "split.", "tokenizer."))
            else f"{writer.arch}.{name}"
        )
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif value is not None:
            writer.add_float32(full, value)


def _add_tokenizer(writer: Any, checkpoint: Path, pre: str) -> None:
    own = json.loads((checkpoint / "tokenizer.json").read_text())
    described = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config = json.loads((checkpoint / "config.json").read_text())
    special = {token["content"]: token["id"] for token in own["added_tokens"]}
    by_id = {idx: token for token, idx in {**own["model"]["vocab"], **special}.items()}
    tokens = [by_id.get(idx, f"[PAD{idx}]") for idx in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [3 if token in special else 1 if idx in by_id else 5 for idx, token in enumerate(tokens)]
    )
    writer.add_token_merges([" ".join(pair) for pair in own["model"]["merges"]])
    writer.add_bos_token_id(special[described["bos_token"]])
    writer.add_eos_token_id(special[described["eos_token"]])
    writer.add_chat_template(described["chat_template"])


def _llama_3_factors(scaling: dict[str, Any], config: dict[str, Any]) -> Any:
    """Return the divisors of frequencies, computed as the converter does."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    found = []
    for idx in range(0, dim, 2):
        length = 2 * np.pi * scaling["rope_theta"] ** (idx / dim)
        smooth = (old / length - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if length < old / high else factor if length > old / low else between)
    return np.array(found, dtype=np.float32)
