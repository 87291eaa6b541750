"""DeviceNet on real streams: on a GPU if there is one, else on the host.

A recording of several layers is replayed many times with other contents; on a GPU the experts and
the reader of their answers are delayed in turn, so that a missing wait shows as a wrong sum.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.runtime import Runtime, open_runtime
from kernels.triton.router.launches import local_slots
from m2n_comm.gpu.local import DeviceNet
from m2n_comm.net import ExpertBatch, NetShape, Serve
from topspin.expert_table import uniform_table

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

NUM_LAYERS, NUM_EXPERTS, TOP_K, HIDDEN, ROWS = 3, 5, 2, 64, 6
REPLAYS = 4
SLEEP_CYCLES = 200_000


def hold_up(runtime: Runtime, *, now: bool) -> None:
    """Keep the current stream of a GPU busy for a tenth of a millisecond."""
    if now and runtime.is_asynchronous:
        torch.cuda._sleep(SLEEP_CYCLES)


class Layers:
    """Two micro-batches through all layers; an expert multiplies rows by its own vector."""

    def __init__(self, num_nodes: int, num_streams: int) -> None:
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
            num_streams=num_streams,
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
            hold_up(self.runtime, now=batch.layer % 2 == 0)
            scale = self._by_node[node][batch.layer][batch.slots.clamp(min=0).long()]
            weights = batch.weights.masked_fill(batch.slots < 0, 0.0)
            return (scale * weights[:, :, None]).sum(1) * batch.hidden

        return serve

    def run(self) -> None:
        """Do the work of a rally: every layer adds its experts' sum to its input."""
        streams = [self.hidden[mb] + 0 for mb in range(2)]
        for layer in range(NUM_LAYERS + 1):
            for mb in range(2):
                if layer > 0:
                    delta = self.net.combine(mb, layer - 1, self._combined[mb])
                    hold_up(self.runtime, now=layer % 2 == 1)
                    streams[mb] = streams[mb] + delta
                    del delta
                if layer < NUM_LAYERS:
                    # Allocated here, without other references.
                    routed = self.experts[mb] + 0, self.weights[mb] * 1.0
                    self.net.dispatch(mb, layer, streams[mb] * 0.5, *routed, self.num_rows[mb])
        for mb in range(2):
            self.results[mb].copy_(streams[mb])

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


@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("num_nodes", [1, 2])
@torch.inference_mode()
def test_recorded_layers_are_right_for_other_contents(num_nodes: int, num_streams: int) -> None:
    layers = Layers(num_nodes, num_streams)
    want = layers.fill(0)
    layers.run()
    torch.testing.assert_close(layers.results.cpu(), want)
    replay = layers.runtime.capture(layers.run)
    for seed in range(1, REPLAYS + 1):
        want = layers.fill(seed)
        replay()
        torch.testing.assert_close(layers.results.cpu(), want)


@pytest.mark.parametrize("num_nodes", [1, 2])
@torch.inference_mode()
def test_steps_that_follow_each_other_unrecorded_are_right(num_nodes: int) -> None:
    layers = Layers(num_nodes, 2)
    wanted, got = [], []
    for seed in range(REPLAYS):
        wanted.append(layers.fill(seed))
        layers.run()
        got.append(layers.results.clone())
    for result, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(result.cpu(), want)
