"""The places of routed experts' matrices in a checkpoint, in either layout.

Owns the choice between an expert's own tensors and a layer's stacked ones, and finding the MoE
block's name. Reads no tensor. Called by models.checkpoints.weights and
models.checkpoints.expert_reader.
"""

from __future__ import annotations

from models.checkpoints.tensor_names import expert_name, fused_expert_name, layer_name
from models.description.config import ModelConfig
from models.quantised.matrices import MatrixReader, Source
from topspin.errors import CheckpointError


def moe_block(reader: MatrixReader, config: ModelConfig, layer_idx: int) -> str:
    """Return the name of a layer's MoE block, found by its router.

    Raises CheckpointError if there is none.
    """
    assert config.moe is not None
    blocks, router = config.moe.names.blocks, config.moe.names.router
    for block in blocks:
        if layer_name(layer_idx, f"{block}.{router}.weight") in reader:
            return block
    wanted = layer_name(layer_idx, f"{blocks[0]}.{router}.weight")
    raise CheckpointError(f"{reader.checkpoint.path}: tensor {wanted} is missing")


class ExpertSources:
    """The matrices of one layer's experts, gate above up rows; each by its expert's id."""

    def __init__(self, reader: MatrixReader, config: ModelConfig, layer_idx: int) -> None:
        """Raises CheckpointError if stacked experts have another shape."""
        assert config.moe is not None
        self._names = config.moe.names
        self._layer_idx = layer_idx
        self._block = moe_block(reader, config, layer_idx)
        hidden, width = config.hidden_size, config.moe.intermediate_size
        self._width, self._hidden = width, hidden
        self.gate_up_shape = (2 * width, hidden)
        self.down_shape = (hidden, width)
        self._is_fused = self._fused("gate_up_proj") in reader
        if self._is_fused:
            num_experts = config.moe.num_experts
            expect_shape = reader.checkpoint.expect_shape
            expect_shape(self._fused("gate_up_proj"), (num_experts, *self.gate_up_shape))
            expect_shape(self._fused("down_proj"), (num_experts, *self.down_shape))

    def gate_up(self, expert_id: int) -> list[Source]:
        """Return the parts of gate_up [2F, H]."""
        if self._is_fused:
            return [Source(self._fused("gate_up_proj"), 2 * self._width, expert_id)]
        names = (self._names.gate, self._names.up)
        return [Source(self._name(name, expert_id), self._width) for name in names]

    def down(self, expert_id: int) -> list[Source]:
        """Return the parts of down [H, F]."""
        if self._is_fused:
            return [Source(self._fused("down_proj"), self._hidden, expert_id)]
        return [Source(self._name(self._names.down, expert_id), self._hidden)]

    def _fused(self, projection: str) -> str:
        return fused_expert_name(self._layer_idx, block=self._block, projection=projection)

    def _name(self, projection: str, expert_id: int) -> str:
        return expert_name(
            self._layer_idx, block=self._block, expert_id=expert_id, projection=projection
        )
