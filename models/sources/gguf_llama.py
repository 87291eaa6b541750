"""A dense Llama in one GGUF file, read with HuggingFace's names and layout.

Owns the GGUF side of making the default model: dimensions, dequantised weights with q and
k rows in HuggingFace's order, and the byte-level BPE tokenizer. Knows no MoE; called by
models.sources.smollm2_moe only. Format: the GGUF specification, through the `gguf` library.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from topspin.errors import ConfigError

Float32Array = npt.NDArray[np.float32]

_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4


class GgufLlama:
    """An open GGUF file of architecture `llama`; its data stays mapped while it lives."""

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises ConfigError if it is not a GGUF file of a dense Llama."""
        self._path = path
        try:
            self._reader: Any = gguf.GGUFReader(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: is not a GGUF file: {error}") from error
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ConfigError(f"{path}: architecture {architecture!r}; supported: llama")
        self.num_layers = int(self._field("llama.block_count"))
        self.hidden_size = int(self._field("llama.embedding_length"))
        self.ffn_size = int(self._field("llama.feed_forward_length"))
        self.num_heads = int(self._field("llama.attention.head_count"))
        self.num_kv_heads = int(self._field("llama.attention.head_count_kv"))
        self.context_length = int(self._field("llama.context_length"))
        self.rope_theta = float(self._field("llama.rope.freq_base"))
        # A float32 in the file: its shortest decimal form is the intended number.
        self.rms_norm_eps = float(
            str(np.float32(self._field("llama.attention.layer_norm_rms_epsilon")))
        )
        self.head_dim = self.hidden_size // self.num_heads
        if self.head_dim * self.num_heads != self.hidden_size:
            raise ConfigError(f"{path}: hidden size {self.hidden_size}, {self.num_heads} heads")
        if "output.weight" in self._tensors:
            raise ConfigError(f"{path}: has its own output.weight; supported: tied embeddings")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self._tensors["token_embd.weight"].shape[1])

    @property
    def bos_token_id(self) -> int:
        """Id that begins a sequence."""
        return int(self._field("tokenizer.ggml.bos_token_id"))

    @property
    def eos_token_id(self) -> int:
        """Id that ends a turn."""
        return int(self._field("tokenizer.ggml.eos_token_id"))

    @property
    def pad_token_id(self) -> int:
        """Id that padding uses."""
        return int(self._field("tokenizer.ggml.padding_token_id"))

    @property
    def chat_template(self) -> str:
        """The chat template's text."""
        return str(self._field("tokenizer.chat_template"))

    def token(self, token_id: int) -> str:
        """Return the text of a vocabulary entry."""
        return str(self._field("tokenizer.ggml.tokens")[token_id])

    def embedding(self) -> Float32Array:
        """Return the embedding, [V, H]."""
        return self._read("token_embd.weight")

    def final_norm(self) -> Float32Array:
        """Return the last norm's weight, [H]."""
        return self._read("output_norm.weight")

    def layer(self, layer_idx: int, name: str) -> Float32Array:
        """Return weight `name` of a layer, e.g. `ffn_down`, in GGUF's layout: [out, in]."""
        return self._read(f"blk.{layer_idx}.{name}.weight")

    def query(self, layer_idx: int) -> Float32Array:
        """Return q_proj [q, H] with each head's rows in HuggingFace's order."""
        return _rotate_half_order(self.layer(layer_idx, "attn_q"), self.num_heads)

    def key(self, layer_idx: int) -> Float32Array:
        """Return k_proj [kv, H] with each head's rows in HuggingFace's order."""
        return _rotate_half_order(self.layer(layer_idx, "attn_k"), self.num_kv_heads)

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Return the byte-level BPE tokenizer; each digit is one token, as in SmolLM2's training.

        Raises ConfigError for any other kind of vocabulary or pre-tokenizer.
        """
        kind = (self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise ConfigError(f"{self._path}: tokenizer {kind}; supported: ('gpt2', 'smollm')")
        tokens: Sequence[str] = self._field("tokenizer.ggml.tokens")
        types: Sequence[int] = self._field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        vocab = {token: token_id for token_id, token in enumerate(tokens)}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        added = [
            AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL_TOKEN, _USER_DEFINED_TOKEN)
        ]
        backend.add_tokens(added)
        return backend

    def _field(self, name: str) -> Any:
        field = self._reader.fields.get(name)
        if field is None:
            raise ConfigError(f"{self._path}: has no {name}")
        return field.contents()

    def _read(self, name: str) -> Float32Array:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{self._path}: has no tensor {name}")
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        # A copy: unquantised data would be a view of the read-only mapping.
        return np.array(values, dtype=np.float32)


def _rotate_half_order(rows: Float32Array, num_heads: int) -> Float32Array:
    """Undo GGUF's order of rotary rows: pairs (0, 1), (2, 3).. back to halves (0, d/2)...

    GGUF rotates neighbouring rows of a head, HuggingFace rows half a head apart; the same
    rotation needs the rows in another order.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))
