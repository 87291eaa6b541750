"""The head of multi-token prediction that a checkpoint carries: one decoder layer and its ends.

Owns the layer's weights, and how the target's final rows and the embeddings of the tokens that
follow them become its input (DeepSeek-V3, arXiv 2412.19437, section 2.2). Embedding and LM head are
the target's. Knows no sequences: its caller puts the rows into `before` and takes them from
`after`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention_nodes.step.decoder import Decoder, NodeLayers
from attention_nodes.step.kv_cache import KvCache
from kernels.dispatch import Ops
from models.checkpoints.mtp_weights import MtpWeights
from models.description.config import ModelConfig
from topspin.plan.precision import Rules, format_of


class MtpLayers(NodeLayers):
    """The head's layer behind the layers of the model, whose last index `config` gives it.

    `before` and `after` [rows, H] hold the final rows that a pass goes on from, one for each of its
    tokens, and those that it makes, one for each that is wanted. Recorded passes read and write
    them where they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: MtpWeights,
        ops: Ops,
        kv_cache: KvCache,
        *,
        max_rows: int,
        precision: Rules = (),
    ) -> None:
        """Pack `weights`, those of `config`'s last layer; share() must follow."""
        idx = config.num_layers - 1
        self._token_norm, self._row_norm = weights.token_norm, weights.row_norm
        self._final_norm = weights.final_norm
        self._join = ops.pack_linear(weights.join, format_of(precision, "attention", idx))
        self._target: Decoder | None = None
        self.before = weights.final_norm.new_zeros(max_rows, config.hidden_size)
        self.after = torch.zeros_like(self.before)
        super().__init__(config, [weights.layer], ops, kv_cache, precision=precision, first=idx)

    def share(self, target: Decoder) -> None:
        """Embed tokens and compute logits with the matrices of `target`."""
        self._target = target

    @property
    def target(self) -> Decoder:
        """Return the model whose tokens are predicted."""
        assert self._target is not None, "share() first"
        return self._target

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the layer's input [T, H] of tokens i64[T] behind the first T rows of `before`."""
        embedded = self.target.embed(tokens)
        num_tokens, hidden = embedded.shape
        joined = embedded.new_empty(num_tokens, 2 * hidden)
        eps = self.config.rms_norm_eps
        self.ops.rms_norm(embedded, self._token_norm, eps=eps, out=joined[:, :hidden])
        before = self.before[:num_tokens]
        self.ops.rms_norm(before, self._row_norm, eps=eps, out=joined[:, hidden:])
        return self.ops.linear(joined, self._join)

    def logits(self, residual: Tensor, out: Tensor | None = None) -> Tensor:
        """Return fp32 logits [R, V], `out` if given, of residual rows [R, H]; fills `after`."""
        after = self.after[: len(residual)]
        eps = self.config.rms_norm_eps
        self.ops.rms_norm(residual, self._final_norm, eps=eps, out=after)
        return self.target.head(after, out=out)
