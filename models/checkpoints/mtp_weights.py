"""The weights of the head of multi-token prediction that a checkpoint carries.

Owns which of its tensors are read: the decoder layer behind the model's, and what joins it to the
model. Copies of the embedding and of the LM head are not read. Knows no device policy and computes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.tensor_names import layer_name
from models.checkpoints.weights import LayerWeights, stream_layers
from models.description.config import ModelConfig
from models.quantised.matrices import MatrixReader, Source
from topspin.plan.precision import Rules


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpWeights:
    """One head: token_norm, row_norm and final_norm [H], join [H, 2H], and its layer.

    `join` takes the normed embedding of a token and the normed final row of the one before it.
    """

    token_norm: Tensor
    row_norm: Tensor
    final_norm: Tensor
    join: Tensor
    layer: LayerWeights


def load_mtp_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    precision: Rules = (),
) -> MtpWeights:
    """Read all but the routed experts of `config`'s last layer, a head (ModelConfig.of_mtp).

    Raises CheckpointError naming a tensor that is missing or has another shape.
    """
    idx, hidden = config.num_layers - 1, config.hidden_size
    reader = MatrixReader(checkpoint, config.quantisation, dtype=dtype, device=device)

    def vector(suffix: str) -> Tensor:
        return reader.read([Source(layer_name(idx, suffix), hidden)])

    join = reader.read([Source(layer_name(idx, "eh_proj.weight"), hidden)], 2 * hidden)
    token_norm, row_norm = vector("enorm.weight"), vector("hnorm.weight")
    final_norm = vector("shared_head.norm.weight")
    (layer,) = stream_layers(
        checkpoint,
        config,
        dtype=dtype,
        layers=range(idx, idx + 1),
        device=device,
        precision=precision,
    )
    return MtpWeights(
        token_norm=token_norm, row_norm=row_norm, final_norm=final_norm, join=join, layer=layer
    )
