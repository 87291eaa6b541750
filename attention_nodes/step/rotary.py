"""Cosines and sines of the rotary embedding, per position.

Owns the tables (or, for dynamic NTK, the computation per token). The frequencies
themselves are models.rope's; knows no weights.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attention_nodes.step.sequences import IntArray
from models.description.config import ModelConfig
from models.rope import inverse_frequencies, is_length_dependent, rope_seq_len


class RotaryTable:
    """Computes cos, sin fp32 [T, D/2] for tokens at given positions.

    `table` has them by position, [max_len, D/2] each; None: they do not depend on it alone.
    """

    def __init__(self, config: ModelConfig, *, max_len: int) -> None:
        self._rope = config.rope
        self._head_dim = config.rotated_dim
        self.table: tuple[Tensor, Tensor] | None = None
        if not is_length_dependent(config.rope):
            self.table = self._cos_sin(torch.arange(max_len), seq_len=max_len)

    @property
    def width(self) -> int:
        """Return D/2."""
        return self._head_dim // 2

    def gather(
        self,
        positions: IntArray,
        num_prompt: IntArray,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) for `positions` [T]; `num_prompt` [T]: each token's prompt length.

        They are written to `out`, if given.
        """
        if out is None:
            out = torch.empty(len(positions), self.width), torch.empty(len(positions), self.width)
        cos, sin = out
        index = torch.from_numpy(positions)
        if self.table is not None:
            for table, values in zip(self.table, out, strict=True):
                torch.index_select(table, 0, index, out=values)
            return out
        seq_lens = np.array(
            [
                rope_seq_len(position, prompt_len=prompt)
                for position, prompt in zip(positions.tolist(), num_prompt.tolist(), strict=True)
            ],
            dtype=np.int64,
        )
        for seq_len in np.unique(seq_lens).tolist():
            chosen = torch.from_numpy(seq_lens == seq_len)
            cos[chosen], sin[chosen] = self._cos_sin(index[chosen], seq_len=seq_len)
        return out

    def _cos_sin(self, positions: Tensor, *, seq_len: int) -> tuple[Tensor, Tensor]:
        frequencies = inverse_frequencies(self._rope, self._head_dim, seq_len=seq_len)
        angles = positions.float()[:, None] * torch.from_numpy(frequencies.inv_freq)[None, :]
        scaling = torch.from_numpy(frequencies.attention_scaling)
        return angles.cos() * scaling, angles.sin() * scaling
