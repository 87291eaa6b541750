"""Make a Qwen3-MoE checkpoint with random weights, for speed only: its output is nonsense.

The shape is that of a small real MoE: 686M parameters, 12 layers, hidden 1024, 32 experts of size
512 of which 4 serve a token, 16 query and 4 key/value heads of 64, a tied vocabulary of 49152.
transformers writes the weights, and the tokenizer is the default model's, so that every peer can
load the directory. Run as

    python -m benchmarks.model_maker DIRECTORY [--dtype bfloat16] [--layers 12]
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make(directory: Path, *, num_layers: int = 12, dtype: str = "bfloat16", seed: int = 0) -> None:
    """Write config, weights and tokenizer into `directory`; refuses one that has a config."""
    if (directory / "config.json").exists():
        raise SystemExit(f"{directory} already has a config.json; choose another directory")
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from models.sources.hub import resolve_model

    torch.manual_seed(seed)
    # transformers 5 declares no head_dim for this family, but accepts it.
    make_config: Any = Qwen3MoeConfig
    config = make_config(
        vocab_size=49152,
        hidden_size=1024,
        intermediate_size=512,
        moe_intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = Qwen3MoeForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)
    source = resolve_model("smollm2-moe")
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the checkpoint of the flags."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_maker", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args(argv)
    make(args.directory, num_layers=args.layers, dtype=args.dtype)
    size_bytes = sum(path.stat().st_size for path in args.directory.iterdir())
    print(f"{args.directory}: {size_bytes / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
