"""The places of routed experts' matrices and biases in a checkpoint, in either layout.

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
        self._has_biases = config.moe.has_biases
        self._is_fused = self._fused("gate_up_proj") in reader
        # Also beside single experts, where a copy was quantised (deploy.quantisation.writing).
        self._has_stacked_biases = self._fused("down_proj_bias") in reader
        shapes = {"gate_up_proj": self.gate_up_shape, "down_proj": self.down_shape}
        for name, shape in shapes.items() if self._is_fused else ():
            # Others are quantised, and checked when they are read.
            if self._fused(name) in reader.checkpoint:
                stored = shape[::-1] if self._names.is_transposed else shape
                expected = (config.moe.num_experts, *stored)
                reader.checkpoint.expect_shape(self._fused(name), expected)

    def gate_up(self, expert_id: int) -> list[Source]:
        """Return the parts of gate_up [2F, H]."""
        if self._is_fused:
            return self._fused_gate_up("gate_up_proj", expert_id)
        names = (self._names.gate, self._names.up)
        return [Source(self._name(name, expert_id), self._width) for name in names]

    def down(self, expert_id: int) -> list[Source]:
        """Return the parts of down [H, F]."""
        if self._is_fused:
            return [self._fused_source("down_proj", self._hidden, expert_id)]
        return [Source(self._name(self._names.down, expert_id), self._hidden)]

    def biases(self, expert_id: int) -> tuple[list[Source], list[Source]] | None:
        """Return the parts of the biases [2F] and [H]; None: the experts have none."""
        if not self._has_biases:
            return None
        if not self._has_stacked_biases:
            own = (self._names.gate, self._names.up)
            gate_up = [Source(self._name(each, expert_id, "bias"), self._width) for each in own]
            down_name = self._name(self._names.down, expert_id, "bias")
            return gate_up, [Source(down_name, self._hidden)]
        down = Source(self._fused("down_proj_bias"), self._hidden, expert_id)
        return self._fused_gate_up("gate_up_proj_bias", expert_id), [down]

    def _fused_gate_up(self, name: str, expert_id: int) -> list[Source]:
        whole = self._fused_source(name, 2 * self._width, expert_id)
        if not self._names.is_interleaved:
            return [whole]
        return [whole._replace(num_rows=self._width, start=start, step=2) for start in (0, 1)]

    def _fused_source(self, name: str, num_rows: int, expert_id: int) -> Source:
        is_transposed = self._names.is_transposed
        return Source(self._fused(name), num_rows, expert_id, is_transposed=is_transposed)

    def _fused(self, projection: str) -> str:
        return fused_expert_name(self._layer_idx, block=self._block, projection=projection)

    def _name(self, projection: str, expert_id: int, kind: str = "weight") -> str:
        return expert_name(
            self._layer_idx,
            block=self._block,
            expert_id=expert_id,
            projection=projection,
            kind=kind,
        )
