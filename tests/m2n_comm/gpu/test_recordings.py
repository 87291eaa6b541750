"""A recording of a DeviceNet's layers, replayed: on a GPU if there is one, else on the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.runtime import open_runtime
from kernels.triton.router.launches import local_slots
from m2n_comm.gpu.local import DeviceNet
from m2n_comm.net import ExpertBatch, NetShape, Serve
from topspin.expert_table import uniform_table

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

NUM_LAYERS, NUM_EXPERTS, TOP_K, HIDDEN, ROWS = 3, 5, 2, 64, 6
REPLAYS = 4


class Layers:
    """Two micro-batches through all layers; an expert multiplies rows by its own vector."""

    def __init__(self, num_nodes: int) -> None:
        self.runtime = open_runtime("cuda" if torch.cuda.is_available() else "cpu")
        device = self.runtime.device
        torch.manual_seed(3)
        self.scale = torch.randn(NUM_LAYERS, NUM_EXPERTS, HIDDEN)
        self.table = uniform_table(
            num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_nodes=num_nodes
        )
        self._by_node = [
            [self.scale[layer, list(held)].to(device) for layer, held in enumerate(layers)]
            for layers in (self.table.experts_of(node) for node in range(num_nodes))
        ]
        shape = NetShape(
            hidden_size=HIDDEN,
            top_k=TOP_K,
            num_layers=NUM_LAYERS,
            payload=torch.float32,
            window_rows=ROWS,
            num_micro_batches=2,
            deadline_s=1.0,
        )
        self.net = DeviceNet(
            self.runtime,
            shape,
            index=0,
            serves=[self._serve_of(node) for node in range(num_nodes)],
            table=self.table,
            slots=local_slots,
        )
        self.hidden = torch.zeros(2, ROWS, HIDDEN, device=device)
        self.experts = torch.zeros(2, ROWS, TOP_K, dtype=torch.int64, device=device)
        self.weights = torch.zeros(2, ROWS, TOP_K, device=device)
        self.num_rows = torch.zeros(2, 1, dtype=torch.int64, device=device)
        self.results = torch.zeros(2, ROWS, HIDDEN, device=device)
        self._combined = torch.empty(2, ROWS, HIDDEN, device=device)

    def _serve_of(self, node: int) -> Serve:
        def serve(batch: ExpertBatch) -> Tensor:
            scale = self._by_node[node][batch.layer][batch.slots.clamp(min=0).long()]
            weights = batch.weights.masked_fill(batch.slots < 0, 0.0)
            return (scale * weights[:, :, None]).sum(1) * batch.hidden

        return serve

    def run(self) -> None:
        """Do the work of a rally: every layer adds its experts' sum to its input."""
        residuals = [self.hidden[mb] + 0 for mb in range(2)]
        for layer in range(NUM_LAYERS + 1):
            for mb in range(2):
                if layer > 0:
                    delta = self.net.combine(mb, layer - 1, self._combined[mb])
                    residuals[mb] = residuals[mb] + delta
                if layer < NUM_LAYERS:
                    # Allocated here, without other references.
                    routed = self.experts[mb] + 0, self.weights[mb] * 1.0
                    self.net.dispatch(mb, layer, residuals[mb] * 0.5, *routed, self.num_rows[mb])
        for mb in range(2):
            self.results[mb].copy_(residuals[mb])

    def fill(self, seed: int) -> Tensor:
        """Fill all inputs with other contents; return the expected results."""
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(2, ROWS, HIDDEN, generator=generator)
        score = torch.rand(2, ROWS, NUM_EXPERTS, generator=generator)
        experts = score.argsort(-1)[..., :TOP_K]
        weights = torch.rand(2, ROWS, TOP_K, generator=generator)
        num_rows = torch.tensor([[1 + seed % ROWS], [ROWS - seed % ROWS]])
        want = hidden.clone()
        is_real = torch.arange(ROWS) < num_rows
        for layer in range(NUM_LAYERS):
            gate = (self.scale[layer][experts] * weights[..., None]).sum(2)
            want = want + torch.where(is_real[..., None], gate * want * 0.5, 0.0)
        self.hidden.copy_(hidden)
        self.experts.copy_(experts)
        self.weights.copy_(weights)
        self.num_rows.copy_(num_rows)
        return want


@pytest.mark.parametrize("num_nodes", [1, 2])
@torch.inference_mode()
def test_recorded_layers_are_right_for_other_contents(num_nodes: int) -> None:
    layers = Layers(num_nodes)
    want = layers.fill(0)
    layers.run()
    torch.testing.assert_close(layers.results.cpu(), want)
    replay = layers.runtime.capture(layers.run)
    for seed in range(1, REPLAYS + 1):
        want = layers.fill(seed)
        replay()
        torch.testing.assert_close(layers.results.cpu(), want)
