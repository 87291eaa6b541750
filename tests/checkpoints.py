"""Tiny random checkpoints of every supported family, and the oracle that generates from them.

Owns the registry of named variants (make_checkpoint), written by transformers itself in float32
with a byte-level tokenizer and a chat template, and oracle_generate: greedy decoding by
transformers with the top-1/top-2 logit margin, so that a test can tell a real difference from one
caused by the order of summation. Shared by all test folders; knows no module of Topspin.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.quality.transformers_names import CACHE

HIDDEN_SIZE = 64
VOCAB_SIZE = 288
BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257

_SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MIXTRAL: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
}
_OLMOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 40}
_GLM4: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "num_mtp_layers": 0,
}
_ERNIE: dict[str, Any] = {
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "rms_norm_eps": 3e-4,
    "tie_word_embeddings": True,
}
# transformers norms latents with 1e-6, whatever rms_norm_eps is; Topspin as this option says.
_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rms_norm_eps": 3e-4,
    "latent_norm_eps": 1e-6,
    "num_mtp_layers": 0,
}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}


class Variant(NamedTuple):
    """A family (a transformers model_type) and its differences from the common tiny shape."""

    model_type: str
    overrides: Mapping[str, Any]


VARIANTS: dict[str, Variant] = {
    "llama": Variant("llama", {"num_key_value_heads": 4}),
    "llama_gqa_rope_linear": Variant(
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama3_rope": Variant("llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_yarn": Variant("llama", {"rope_parameters": _YARN_ROPE, "max_position_embeddings": 128}),
    "llama_dynamic_ntk": Variant(
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            "max_position_embeddings": 16,
        },
    ),
    "llama_bias": Variant("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mixtral": Variant("mixtral", _MIXTRAL),
    "mixtral_sliding_window": Variant(
        "mixtral", {**_MIXTRAL, "sliding_window": 8, "tie_word_embeddings": True}
    ),
    "qwen2_moe": Variant(
        "qwen2_moe",
        {
            **_MOE,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
    "qwen2_moe_sparse_step": Variant(
        "qwen2_moe",
        {
            **_MOE,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
        },
    ),
    "qwen3_moe": Variant(
        "qwen3_moe",
        {**_MOE, "num_experts_per_tok": 4, "head_dim": 32, "norm_topk_prob": True},
    ),
    "qwen3_moe_unnormalised": Variant(
        "qwen3_moe",
        {
            **_MOE,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "head_dim": 8,
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "olmoe": Variant("olmoe", {**_OLMOE, "norm_topk_prob": False}),
    "olmoe_clip_qkv": Variant(
        "olmoe",
        {
            **_OLMOE,
            "num_key_value_heads": 4,
            "clip_qkv": 0.7,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    ),
    "glm4_moe": Variant(
        "glm4_moe",
        {
            **_GLM4,
            "head_dim": 24,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "glm4_moe_yarn": Variant(
        "glm4_moe",
        {
            **_GLM4,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "rms_norm_eps": 3e-4,
            "rope_parameters": {**_YARN_ROPE, "partial_rotary_factor": 0.75},
            "max_position_embeddings": 128,
        },
    ),
    "minimax_m2": Variant(
        "minimax_m2",
        {
            **_MIXTRAL,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "ernie4_5_moe": Variant("ernie4_5_moe", {**_ERNIE, "head_dim": 20}),
    "ernie4_5_moe_sparse_step": Variant(
        "ernie4_5_moe",
        {
            **_ERNIE,
            "num_hidden_layers": 6,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
            "rope_parameters": _YARN_ROPE,
            "max_position_embeddings": 128,
        },
    ),
    "deepseek_v2": Variant(
        "deepseek_v2",
        {
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "attention_bias": True,
        },
    ),
    "deepseek_v2_lite": Variant(
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_parameters": {**_YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.6},
            "max_position_embeddings": 128,
        },
    ),
    "deepseek_v3": Variant(
        "deepseek_v3",
        {
            **_LATENT,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
            "max_position_embeddings": 128,
        },
    ),
    "deepseek_v3_halves": Variant(
        "deepseek_v3",
        {
            **_LATENT,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe_lite": Variant(
        "glm4_moe_lite",
        {
            **_LATENT,
            "qk_nope_head_dim": 24,
            "v_head_dim": 32,
            "n_shared_experts": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "gpt_oss": Variant(
        "gpt_oss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "intermediate_size": 64,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "max_position_embeddings": 256,
            # Most gates and ups are within 7.
            "swiglu_limit": 0.9,
        },
    ),
}

MOE_VARIANTS: tuple[str, ...] = tuple(
    name for name, variant in VARIANTS.items() if variant.model_type != "llama"
)


class Generated(NamedTuple):
    """One prompt's continuation: its tokens, and the least top-1/top-2 logit margin."""

    tokens: list[int]
    margin: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleResult:
    """Per prompt: the greedy tokens, and the minimum logit margin over the steps."""

    tokens: list[list[int]]
    margins: list[float]


def make_checkpoint(path: Path, name: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write variant `name` (a key of VARIANTS) into directory `path` and return it.

    Weights depend on `seed` only. `overrides` change options of the HuggingFace config.
    """
    variant = VARIANTS[name]
    options = {**_COMMON, **variant.overrides, **overrides}
    model = _build(variant.model_type, options)
    _randomise(model, seed=seed)
    path.mkdir(parents=True, exist_ok=True)
    _quietly(lambda: model.save_pretrained(path))
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """Write tokenizer.json (one token per byte, a few merges, specials) and its configuration."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: idx for idx, symbol in enumerate(alphabet)}
    for idx, token in enumerate(_SPECIAL_TOKENS):
        vocab[token] = BOS_TOKEN_ID + idx
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("\u0120", "the"), ("e", "r")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def oracle_model(path: Path) -> Any:
    """Return transformers' float32 model of a checkpoint, in evaluation mode."""
    loader = _transformers().AutoModelForCausalLM
    return _quietly(
        lambda: loader.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    )


def oracle_generate(
    path: Path,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    stop_at_eos: bool = False,
) -> OracleResult:
    """Continue each prompt alone (no padding) by transformers, greedily, in float32.

    Without stop_at_eos every continuation has max_new_tokens tokens.
    """
    model = oracle_model(path)
    eos = _eos_ids(model) if stop_at_eos else frozenset()
    results = [_generate(model, prompt, max_new_tokens, eos) for prompt in prompts]
    return OracleResult(
        tokens=[result.tokens for result in results], margins=[result.margin for result in results]
    )


def _build(model_type: str, options: Mapping[str, Any]) -> Any:
    library = _transformers()
    config = _quietly(lambda: library.AutoConfig.for_model(model_type, **options))
    loader = library.AutoModelForCausalLM
    return _quietly(lambda: loader.from_config(config).to(torch.float32).eval())


def _transformers() -> Any:
    # Imported late: it takes a second, which tests without an oracle should not spend.
    return importlib.import_module("transformers")


def _randomise(model: Any, *, seed: int) -> None:
    """Give every parameter a random value by which each part of the network matters."""
    generator = torch.Generator().manual_seed(seed)
    is_tied = bool(model.config.tie_word_embeddings)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                # A gain of four makes up for the small tied embedding.
                gain = 4.0 if is_tied and name == "model.norm.weight" else 1.0
                parameter.copy_(gain * (1.0 + 0.2 * noise))
            else:
                parameter.copy_(_scale(name, noise.shape[-1], is_tied=is_tied) * noise)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def _scale(name: str, num_inputs: int, *, is_tied: bool) -> float:
    scale: float = num_inputs**-0.5
    if name.endswith("e_score_correction_bias"):  # of a softmax, whose scores are small
        return 0.1
    if name.endswith("bias"):
        return 0.3
    if "embed_tokens" in name:
        # With a large tied embedding the model would only repeat the last token.
        return 0.1 if is_tied else 1.0
    if name.endswith("gate.weight") or "shared_expert_gate" in name:
        return 2.0 * scale
    if "lm_head" in name:
        return 3.0 * scale
    return 1.3 * scale


def _generate(
    model: Any, prompt: Sequence[int], max_new_tokens: int, eos: frozenset[int]
) -> Generated:
    # Dynamic NTK frequencies are state of the module; a fresh module gives those that a request
    # sees alone.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)
    tokens: list[int] = []
    margin = float("inf")
    cache = _transformers().DynamicCache(config=model.config)
    input_ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        for _ in range(max_new_tokens):
            output = model(input_ids=input_ids, use_cache=True, **{CACHE: cache})
            best = output.logits[0, -1].float().topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            token = int(best.indices[0])
            tokens.append(token)
            if token in eos:
                break
            input_ids = torch.tensor([[token]])
    return Generated(tokens=tokens, margin=margin)


def _eos_ids(model: Any) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def _quietly(action: Callable[[], Any]) -> Any:
    """Run `action` without transformers' progress bars and notices."""
    logging = _transformers().utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return action()
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
