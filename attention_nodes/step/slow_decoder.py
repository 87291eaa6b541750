"""A decoder of an emulated slower device: each of its parts takes a multiple of its time.

Owns which work of an attention node counts: the embedding, the halves of layers, and the head, but
neither planning nor sampling. Used for plans of devices that the machine does not have.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attention_nodes.step.decoder import Decoder, Layer, NodeLayers
from attention_nodes.step.step_inputs import MicroBatchInputs
from kernels.contracts import Routing


class SlowLayers(NodeLayers):
    """Takes `slow` times as long; nothing else differs."""

    def __init__(self, *arguments: Any, slow: float, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # Imported here: a host with a GPU may lack numba, with which it is compiled.
        from kernels.cpu.compiled.slowdown import Slowdown

        self._slowdown = Slowdown(slow)

    def attention_half(
        self, layer: Layer, residual: Tensor, delta: Tensor | None, inputs: MicroBatchInputs
    ) -> Tensor:
        with self._slowdown:
            return super().attention_half(layer, residual, delta, inputs)

    def route(self, layer: Layer, normed: Tensor) -> Routing:
        with self._slowdown:
            return super().route(layer, normed)

    def routed_experts(self, *arguments: Any, **settings: Any) -> Tensor:
        with self._slowdown:
            return super().routed_experts(*arguments, **settings)

    def local_mlp(self, layer: Layer, normed: Tensor) -> Tensor | None:
        if layer.mlp is None:
            return None
        with self._slowdown:
            return super().local_mlp(layer, normed)


class SlowDecoder(SlowLayers, Decoder):
    """The same for a model's two ends too."""

    def embed(self, tokens: Tensor) -> Tensor:
        with self._slowdown:
            return super().embed(tokens)

    def logits(self, residual: Tensor, out: Tensor | None = None) -> Tensor:
        with self._slowdown:
            return super().logits(residual, out)
