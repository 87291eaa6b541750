"""A dense Llama in one GGUF file, read with HuggingFace's names and layout.

Owns the GGUF side of making the default model: dimensions, and dequantised weights with q and k
rows in HuggingFace's order. Knows no MoE; called by models.sources.smollm2_moe only. A served file
is read otherwise, in its own blocks (models.sources.gguf_checkpoint).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tokenizers

from models.sources.gguf_file import Float32Array, GgufFile
from models.sources.gguf_tokenizer import read_tokenizer
from topspin.errors import ConfigError


class GgufLlama:
    """An open GGUF file of architecture `llama`; its data stays mapped while it lives."""

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises ConfigError if it is not a GGUF file of a dense Llama."""
        self._file = GgufFile(path)
        if self._file.architecture != "llama":
            raise ConfigError(f"{path}: architecture {self._file.architecture!r}; supported: llama")
        own = self._file.fields("llama.")
        self.num_layers = own.positive_int("block_count")
        self.hidden_size = own.positive_int("embedding_length")
        self.ffn_size = own.positive_int("feed_forward_length")
        self.num_heads = own.positive_int("attention.head_count")
        self.num_kv_heads = own.positive_int("attention.head_count_kv")
        self.context_length = own.positive_int("context_length")
        self.rope_theta = own.number("rope.freq_base")
        self.rms_norm_eps = own.number("attention.layer_norm_rms_epsilon")
        self.head_dim = self.hidden_size // self.num_heads
        if self.head_dim * self.num_heads != self.hidden_size:
            raise ConfigError(f"{path}: hidden size {self.hidden_size}, {self.num_heads} heads")
        if "output.weight" in self._file.tensors:
            raise ConfigError(f"{path}: has its own output.weight; supported: tied embeddings")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._file.tensor("token_embd.weight").shape[0]

    @property
    def bos_token_id(self) -> int:
        """Id that begins a sequence."""
        return int(self._file.field("tokenizer.ggml.bos_token_id"))

    @property
    def eos_token_id(self) -> int:
        """Id that ends a turn."""
        return int(self._file.field("tokenizer.ggml.eos_token_id"))

    @property
    def pad_token_id(self) -> int:
        """Id that padding uses."""
        return int(self._file.field("tokenizer.ggml.padding_token_id"))

    @property
    def chat_template(self) -> str:
        """The chat template's text."""
        return str(self._file.field("tokenizer.chat_template"))

    def token(self, token_id: int) -> str:
        """Return the text of a vocabulary entry."""
        return str(self._file.field("tokenizer.ggml.tokens")[token_id])

    def embedding(self) -> Float32Array:
        """Return the embedding, [V, H]."""
        return self._file.read("token_embd.weight")

    def final_norm(self) -> Float32Array:
        """Return the last norm's weight, [H]."""
        return self._file.read("output_norm.weight")

    def layer(self, layer_idx: int, name: str) -> Float32Array:
        """Return weight `name` of a layer, e.g. `ffn_down`, in GGUF's layout: [out, in]."""
        return self._file.read(f"blk.{layer_idx}.{name}.weight")

    def query(self, layer_idx: int) -> Float32Array:
        """Return q_proj [q, H] with each head's rows in HuggingFace's order."""
        return _rotate_half_order(self.layer(layer_idx, "attn_q"), self.num_heads)

    def key(self, layer_idx: int) -> Float32Array:
        """Return k_proj [kv, H] with each head's rows in HuggingFace's order."""
        return _rotate_half_order(self.layer(layer_idx, "attn_k"), self.num_kv_heads)

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Return the tokenizer; raises ConfigError as models.sources.gguf_tokenizer does."""
        return read_tokenizer(self._file)


def _rotate_half_order(rows: Float32Array, num_heads: int) -> Float32Array:
    """Undo GGUF's order of rotary rows: pairs (0, 1), (2, 3).. back to halves (0, d/2)...

    GGUF rotates neighbouring rows of a head, HuggingFace rows half a head apart; the same
    rotation needs the rows in another order.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))
