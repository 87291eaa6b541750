"""The shapes that `make gpu` runs end to end, as the fields of a checkpoint's config.json.

Tests build transformers' model from the same fields. Knows no tensors. Called by
benchmarks.gpu.engine and benchmarks.gpu.decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Fields = dict[str, Any]

_QWEN3_MOE: Final[Fields] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

QWEN3_30B: Final[Fields] = {
    **_QWEN3_MOE,
    "torch_dtype": "bfloat16",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40_960,
}
"""Qwen3-30B-A3B."""

TINY: Final[Fields] = {
    **_QWEN3_MOE,
    "torch_dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
"""The same family at a size that Triton's interpreter runs in seconds."""


@dataclass(frozen=True)
class Workload:
    """A model's shape and its use."""

    name: str
    fields: Fields
    context: int
    """The number of positions of every sequence whose decoding is timed."""
    batches: tuple[int, ...]
    prefill_tokens: int
    """The length of the prompt whose prefill is timed."""
    rounds: int
    """The number of timed repetitions; the result is their median."""
    steps: int
    """Decode steps of a repetition."""

    @property
    def max_len(self) -> int:
        """The positions that a sequence may need: context, rounds, warm-up and profile."""
        return self.context + (self.rounds + 2) * self.steps


FULL: Final = Workload("Qwen3-30B-A3B", QWEN3_30B, 2048, (1, 32, 128), 8192, 5, 48)
QUICK: Final = Workload("tiny Qwen3-MoE", TINY, 20, (3,), 8, 1, 1)
