"""Make a checkpoint with random weights, for speed only: its output is nonsense.

The shape is that of a small real MoE: 686M parameters, 12 layers, hidden 1024, 32 experts of size
512 of which 4 serve a token, 16 query and 4 key/value heads of 64, a tied vocabulary of 49152
(Qwen3-MoE). Or, with `--mxfp4`, three layers of gpt-oss-20b as it is published (2.0 GB): hidden
2880, 32 experts of size 2880 in mxfp4 of which 4 serve a token, 64 query and 8 key/value heads of
64, sinks, biases and windows; the vocabulary is cut to 49152.
transformers says which weights there are, and the tokenizer is the default model's, so that every
peer can load the directory. Run as

    python -m benchmarks.model_maker DIRECTORY [--dtype bfloat16] [--layers 12] [--mxfp4]
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
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
# Of e2m1's random codes, which have a standard deviation of 2.9: 2 ** (120 - 127).
MXFP4_EXPONENT = 120


def make(directory: Path, *, num_layers: int = 12, dtype: str = "bfloat16", seed: int = 0) -> None:
    """Write config, weights and tokenizer into `directory`; refuses one that has a config."""
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
        max_position_embeddings=8192,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    )
    model = Qwen3MoeForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)


def make_mxfp4(directory: Path, *, num_layers: int = 3, seed: int = 0, **sizes: int) -> None:
    """Write a model with experts in mxfp4, as make() one without; `sizes` are other ones."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Make the checkpoint of the flags."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_maker", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=None, help="(12, with --mxfp4 3)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--mxfp4", action="store_true", help="gpt-oss; all but experts in bfloat16")
    args = parser.parse_args(argv)
    if args.mxfp4 and args.dtype != "bfloat16":
        parser.error("--mxfp4 goes with --dtype bfloat16")
    if args.mxfp4:
        make_mxfp4(args.directory, num_layers=args.layers or 3)
    else:
        make(args.directory, num_layers=args.layers or 12, dtype=args.dtype)
    size_bytes = sum(path.stat().st_size for path in args.directory.iterdir())
    print(f"{args.directory}: {size_bytes / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
