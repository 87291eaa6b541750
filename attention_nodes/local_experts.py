"""The routed experts that an attention node computes itself: all of chosen MoE layers.

Owns their packed weights. Which of these layers are local in a step, the expert table says:
rally.py asks the net. The arithmetic is that of expert nodes (kernels.experts.layers). Knows no
step. Loaded by loading.py, and by draft nodes for their own model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from kernels import deterministic
from kernels.contracts import PackedExperts, Routing
from kernels.dispatch import Ops
from kernels.experts import layers as expert_layers
from kernels.experts.layers import LayerExperts
from kernels.runtime import Runtime
from m2n_comm.gpu.local import slots_on
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.weights import stream_expert_weights
from models.description.config import ModelConfig
from topspin.plan.precision import Rules


class ColocatedExperts:
    """Experts by MoE layer, in the order of their ids."""

    def __init__(
        self,
        packed: Mapping[int, PackedExperts],
        ops: Ops,
        *,
        num_experts: int,
        top_k: int,
        device: torch.device,
        per_expert: bool = False,
    ) -> None:
        """Compute with `packed`, all `num_experts` of each MoE layer, which are on `device`.

        `per_expert`: a token's rows are added by expert id (NetShape.per_expert_answers).
        """
        self._packed = packed
        self._ops = ops
        self._top_k = top_k
        self._device = device
        self._per_expert = per_expert
        # An expert is its own slot. Looking that up can be recorded; a cast of indices cannot.
        self._slot_of = torch.arange(num_experts, dtype=torch.int32, device=device)[None]
        self._slots = slots_on(device)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        model: ModelConfig,
        ops: Ops,
        runtime: Runtime,
        *,
        layers: Collection[int],
        dtype: torch.dtype,
        precision: Rules = (),
        per_expert: bool = False,
    ) -> ColocatedExperts:
        """Read and pack the experts of decoder `layers`."""
        assert model.moe is not None
        num_experts, top_k = model.moe.num_experts, model.moe.top_k
        every = tuple(range(num_experts))
        held = [every if layer in layers else () for layer in model.moe_layers]
        streams = stream_expert_weights(
            checkpoint,
            model,
            dtype=dtype,
            experts=held,
            device=runtime.device,
            precision=precision,
        )
        packed: dict[int, PackedExperts] = {}
        for idx, (layer, stream) in enumerate(zip(model.moe_layers, streams, strict=True)):
            if held[idx]:
                activation = model.moe.activation
                own = LayerExperts(layer, num_experts, top_k, precision, activation)
                packed[idx] = own.pack(
                    ops, stream.gate_up, stream.down, every, biases=stream.biases
                )
        return cls(
            packed,
            ops,
            num_experts=num_experts,
            top_k=top_k,
            device=runtime.device,
            per_expert=per_expert,
        )

    @property
    def layers(self) -> frozenset[int]:
        """Return the MoE layers whose experts are here."""
        return frozenset(self._packed)

    def compute(
        self,
        layer: int,
        normed: Tensor,
        routing: Routing,
        *,
        num_rows: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the sums [T, H] over the routed experts of normed [T, H] in MoE layer `layer`.

        Rows from num_rows[0] on are padding. The result is `out` f32[T, H], if given.
        """
        slots = self._slots(routing.experts, self._slot_of, num_rows)[0]
        found = expert_layers.compute(
            self._ops,
            normed,
            slots,
            routing.weights,
            self._packed[layer],
            per_expert=self._per_expert,
            out=out,
        ).out
        if not self._per_expert:
            return found
        out = normed.new_empty(normed.shape, dtype=torch.float32) if out is None else out
        order, weights = deterministic.order_of(routing.experts, routing.weights.float())
        deterministic.add_by_expert(found, order, weights, out)
        return out

    def warm_up(self, num_rows: Sequence[int] = (1,)) -> None:
        """Compute each number of rows in every layer, so that the first request finds code."""
        for packed in self._packed.values():
            for rows in num_rows:
                expert_layers.warm_up(
                    self._ops,
                    packed,
                    rows,
                    top_k=self._top_k,
                    device=self._device,
                    per_expert=self._per_expert,
                )
