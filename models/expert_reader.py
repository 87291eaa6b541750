"""Reading single experts out of a checkpoint, a little at a time.

Owns the division of one expert's reading into pieces, so that a node can read between steps, and
the request to the system to load the file's pages. The names and layouts are those of
models.weights, which reads a node's whole share at start. Called by expert nodes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import torch
from torch import Tensor

from models.checkpoint import Checkpoint
from models.config import ModelConfig
from models.families import FAMILIES, expert_name, fused_expert_name, layer_name
from topspin.errors import CheckpointError

# About half a millisecond of copying from the page cache.
PIECE_BYTES = 2 * 2**20


class ExpertTensors(NamedTuple):
    """One expert: gate_up [2F, H] (gate rows above up rows), down [H, F]."""

    gate_up: Tensor
    down: Tensor


class _Source(NamedTuple):
    """A matrix in the checkpoint (slice `slice_idx` of a stacked one), and its destination."""

    name: str
    slice_idx: int | None
    out: Tensor


class ExpertReader:
    """Reads the experts of one model's MoE layers, converted to `dtype`, onto `device`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        assert config.moe is not None
        self._checkpoint = checkpoint
        self._config = config
        self._moe = config.moe
        self._family = FAMILIES[config.family]
        self._dtype = dtype
        self._device = device

    def read_ahead(self, layer: int, expert: int) -> None:
        """Start loading the pages of an expert of MoE layer `layer` in the background."""
        for source in self._sources(layer, expert, self._empty("meta")):
            self._checkpoint.read_ahead(source.name, index=source.slice_idx)

    def read(self, layer: int, expert: int) -> Generator[None, None, ExpertTensors]:
        """Return an expert of MoE layer `layer`; yields after each piece.

        Raises CheckpointError as models.weights.load_expert_weights.
        """
        tensors = self._empty(self._device)
        for source in self._sources(layer, expert, tensors):
            num_rows, row_bytes = source.out.shape[0], source.out[0].nbytes
            step = max(1, PIECE_BYTES // row_bytes)
            for low in range(0, num_rows, step):
                rows = range(low, min(low + step, num_rows))
                self._checkpoint.read_into(
                    source.name, source.out[low : rows.stop], index=source.slice_idx, rows=rows
                )
                yield
        return tensors

    def close(self) -> None:
        """Unmap the file; reading opens it again."""
        self._checkpoint.close()

    def _empty(self, device: torch.device | str) -> ExpertTensors:
        hidden, width = self._config.hidden_size, self._moe.intermediate_size
        return ExpertTensors(
            torch.empty(2 * width, hidden, dtype=self._dtype, device=device),
            torch.empty(hidden, width, dtype=self._dtype, device=device),
        )

    def _sources(self, layer: int, expert: int, tensors: ExpertTensors) -> list[_Source]:
        assert 0 <= expert < self._moe.num_experts, f"expert {expert}"
        layer_idx = self._config.moe_layers[layer]
        block, width = self._block(layer_idx), self._moe.intermediate_size
        fused = [
            fused_expert_name(layer_idx, block=block, projection=projection)
            for projection in ("gate_up_proj", "down_proj")
        ]
        if fused[0] in self._checkpoint:
            return [_Source(name, expert, out) for name, out in zip(fused, tensors, strict=True)]
        family = self._family
        return [
            _Source(
                expert_name(layer_idx, block=block, expert_id=expert, projection=projection),
                None,
                out,
            )
            for projection, out in (
                (family.expert_gate, tensors.gate_up[:width]),
                (family.expert_up, tensors.gate_up[width:]),
                (family.expert_down, tensors.down),
            )
        ]

    def _block(self, layer_idx: int) -> str:
        """Return the name of the layer's MoE block, found by its router."""
        for block in self._family.moe_blocks:
            if layer_name(layer_idx, f"{block}.gate.weight") in self._checkpoint:
                return block
        raise CheckpointError(f"{self._checkpoint.path}: layer {layer_idx} has no router")
