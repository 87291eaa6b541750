"""Reading single experts out of a checkpoint, a little at a time.

Owns the division of one expert's reading into pieces, so that a node can read between steps, and
the request to the system to load the file's pages. The names and layouts are those of
models.checkpoints.weights, which reads a node's whole share at start. Called by expert nodes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import torch
from torch import Tensor

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.expert_sources import ExpertSources
from models.description.config import ModelConfig
from models.quantised.coded import StoredMatrix, stacked
from models.quantised.matrices import Matrix, MatrixReader, Source

# About half a millisecond of copying from the page cache.
PIECE_BYTES = 2 * 2**20


class ExpertTensors(NamedTuple):
    """One expert: gate_up [2F, H] (gate rows above up rows), down [H, F], and biases [2F], [H]."""

    gate_up: Matrix
    down: Matrix
    biases: tuple[Tensor, Tensor] | None = None


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
        self._num_experts = config.moe.num_experts
        self._reader = MatrixReader(checkpoint, config.quantisation, dtype=dtype, device=device)
        self._num_numbers = PIECE_BYTES // dtype.itemsize

    def read_ahead(self, layer: int, expert: int) -> None:
        """Start loading the pages of an expert of MoE layer `layer` in the background."""
        sources = self._sources(layer, expert)
        for source in (*sources.gate_up(expert), *sources.down(expert)):
            self._reader.read_ahead(source)

    def read(
        self, layer: int, expert: int, *, keep_codes: bool = False
    ) -> Generator[None, None, ExpertTensors]:
        """Return an expert of MoE layer `layer`; yields after each piece.

        With `keep_codes` its matrices stay coded if the checkpoint has codes. Raises
        CheckpointError as models.checkpoints.weights.stream_expert_weights.
        """
        sources = self._sources(layer, expert)
        (_, hidden), (_, width) = sources.gate_up_shape, sources.down_shape
        gate_up = yield from self._matrix(sources.gate_up(expert), hidden, keep_codes)
        down = yield from self._matrix(sources.down(expert), width, keep_codes)
        places = sources.biases(expert)
        if places is None:
            return ExpertTensors(gate_up, down)
        of_gate_up, of_down = map(self._reader.read, places)
        yield
        return ExpertTensors(gate_up, down, (of_gate_up, of_down))

    def close(self) -> None:
        """Unmap the file; reading opens it again."""
        self._checkpoint.close()

    def _matrix(
        self, sources: list[Source], num_in: int, keep_codes: bool
    ) -> Generator[None, None, Matrix]:
        if keep_codes:
            coded: list[StoredMatrix | None] = []
            for piece in self._reader.coded_pieces(sources, num_in, num_numbers=self._num_numbers):
                coded.append(piece)
                yield
            found = [piece for piece in coded if piece is not None]
            together = stacked(found) if found else None
            if together is not None:
                return together
        out = self._reader.empty(sum(source.num_rows for source in sources), num_in)
        for _ in self._reader.pieces(sources, out, num_numbers=self._num_numbers):
            yield
        return out

    def _sources(self, layer: int, expert: int) -> ExpertSources:
        assert 0 <= expert < self._num_experts, f"expert {expert}"
        return ExpertSources(self._reader, self._config, self._config.moe_layers[layer])
