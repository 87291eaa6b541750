"""Make a checkpoint with random weights, for speed only: its output is nonsense.

Shapes, by name:

- qwen3-moe: that of a small real MoE: 686M parameters, 12 layers, hidden 1024, 32 experts of size
  512 of which 4 serve a token, 16 query and 4 key/value heads of 64, a tied vocabulary of 49152.
- gpt-oss: three layers of gpt-oss-20b as it is published (2.0 GB): hidden 2880, 32 experts of size
  2880 in mxfp4 of which 4 serve a token, 64 query and 8 key/value heads of 64, sinks, biases and
  windows.
- deepseek-v2-lite: four layers of it (4.1 GB): hidden 2048, latents of 512 numbers and rotated keys
  of 64 for 16 heads of 128, a dense layer of 10944, 64 experts of size 1408 of which 6 serve a
  token, and two shared ones. Queries have a latent of 1536 as in DeepSeek-V2: llama.cpp tells
  models without by 27 layers.
- glm-mtp: 24 layers of the first shape as GLM-4.5 has them (2.8 GB), and a head of multi-token
  prediction. Tokens follow mostly from the token before, and the head knows how.

The vocabulary is the default model's, as the tokenizer is, so that every peer can load the
directory; transformers says which weights there are. Run as

    python -m benchmarks.model_maker DIRECTORY [--shape qwen3-moe] [--dtype bfloat16] [--layers N]
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
COMMON = {
    "vocab_size": 49152,
    "head_dim": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
STANDARD_DEVIATION = 0.02
RESIDUAL_SHARE = 0.02
"""Of what layers usually add to the rows, where tokens are to follow from the one before."""
# Of e2m1's random codes, which have a standard deviation of 2.9: 2 ** (120 - 127).
MXFP4_EXPONENT = 120


def make(directory: Path, *, num_layers: int = 12, dtype: str = "bfloat16", seed: int = 0) -> None:
    """Write config, weights and tokenizer into `directory`; refuses one that has a config.

    The shape is qwen3-moe.
    """
    _begin(directory)
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    # transformers 5 declares no head_dim for this family, but accepts it.
    make_config: Any = Qwen3MoeConfig
    config = make_config(
        **COMMON,
        hidden_size=1024,
        intermediate_size=512,
        moe_intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=40960,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    )
    model = Qwen3MoeForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)


def make_mxfp4(directory: Path, *, num_layers: int = 3, seed: int = 0, **sizes: int) -> None:
    """Write the shape gpt-oss, as make() its own; `sizes` are other ones."""
    _begin(directory)
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, GptOssConfig, GptOssForCausalLM

    torch.manual_seed(seed)
    make_config: Any = GptOssConfig
    config = make_config(
        **{**COMMON, "num_hidden_layers": num_layers, "num_local_experts": 32, **sizes},
        dtype="bfloat16",
        architectures=["GptOssForCausalLM"],
    )
    with torch.device("meta"):
        names = GptOssForCausalLM(config).state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in ((name, each.shape) for name, each in names.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, num_in, num_out = shape
            size = (num_experts, num_out, num_in // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full(size, MXFP4_EXPONENT, dtype=torch.uint8)
        elif name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensors[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(0, STANDARD_DEVIATION)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.save_pretrained(directory)
    GenerationConfig.from_dict({"eos_token_id": 2}).save_pretrained(directory)


def make_latent(directory: Path, *, num_layers: int = 4, seed: int = 0, **sizes: int) -> None:
    """Write the shape deepseek-v2-lite, as make() its own; `sizes` are other ones."""
    from transformers import DeepseekV2Config

    options = {
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 16384,
    }
    make_config: Any = DeepseekV2Config
    others = {name: value for name, value in COMMON.items() if name != "head_dim"}
    config = make_config(**{**others, **options, "num_hidden_layers": num_layers, **sizes})
    _save(directory, config, seed=seed)


def make_with_head(directory: Path, *, num_layers: int = 24, seed: int = 0, **sizes: int) -> None:
    """Write the shape glm-mtp, as make() its own; `sizes` are other ones."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Glm4MoeConfig

    options = {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 8192,
        "num_nextn_predict_layers": 1,
    }
    make_config: Any = Glm4MoeConfig
    config = make_config(**{**COMMON, **options, "num_hidden_layers": num_layers, **sizes})
    _save(directory, config, seed=seed)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= RESIDUAL_SHARE
    tensors["model.embed_tokens.weight"] /= STANDARD_DEVIATION
    last, head = (f"model.layers.{idx}." for idx in (num_layers - 1, num_layers))
    for name in [each for each in tensors if each.startswith(last)]:
        tensors[head + name.removeprefix(last)] = tensors[name].clone()
    ones = torch.ones(config.hidden_size, dtype=torch.bfloat16)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{head}{name}.weight"] = ones.clone()
    # The embedding of a token, and nothing of the row before it.
    token = torch.eye(config.hidden_size, dtype=torch.bfloat16)
    tensors[f"{head}eh_proj.weight"] = torch.cat([token, torch.zeros_like(token)], 1)
    save_file(tensors, path, {"format": "pt"})


def _save(directory: Path, config: Any, *, seed: int) -> None:
    """Write a random model of `config` in bfloat16."""
    _begin(directory)
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)


def _begin(directory: Path) -> None:
    """Make the directory with the tokenizer of the default model, which has to be there."""
    from models.sources.hub import resolve_model

    if (directory / "config.json").exists():
        raise SystemExit(f"{directory} already has a config.json; choose another directory")
    source = resolve_model("smollm2-moe")
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)


_BF16_SHAPES: dict[str, Callable[..., None]] = {
    "gpt-oss": make_mxfp4,
    "deepseek-v2-lite": make_latent,
    "glm-mtp": make_with_head,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the checkpoint of the flags."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_maker", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help="(by the shape)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--shape", choices=("qwen3-moe", *_BF16_SHAPES), default="qwen3-moe")
    args = parser.parse_args(argv)
    sizes = {} if args.layers is None else {"num_layers": args.layers}
    if args.shape == "qwen3-moe":
        make(args.directory, dtype=args.dtype, **sizes)
    elif args.dtype != "bfloat16":
        parser.error(f"--shape {args.shape} goes with --dtype bfloat16")
    else:
        _BF16_SHAPES[args.shape](args.directory, **sizes)
    size_bytes = sum(path.stat().st_size for path in args.directory.iterdir())
    print(f"{args.directory}: {size_bytes / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
