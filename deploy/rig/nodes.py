"""One attention node and one expert node without a scheduler.

Owns the composition: the nodes' own parts, over weights of a checkpoint or random ones, with an
expert table that gives every expert to the one expert node. Knows no socket (nets.py): a machine
with a GPU may have torch and nothing else. Called by all that measures nodes: app.launch.trial,
deploy.profiling and benchmarks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from attention_nodes.step import kv_cache
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.model_runner import ModelRunner
from deploy.rig.random_weights import RandomWeights
from deploy.rig.steps import Batch
from expert_nodes.experts import Experts
from kernels.dispatch import Ops, select_ops
from kernels.runtime import Runtime, open_runtime
from m2n_comm.gpu.local import DeviceNet
from m2n_comm.net import Serve
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.weights import (
    AttentionWeights,
    ExpertStream,
    stream_attention_weights,
    stream_expert_weights,
)
from models.description.config import ModelConfig, load_model_config
from topspin.devices import NodeRole
from topspin.expert_table import ExpertTable, uniform_table
from topspin.plan.precision import formats
from topspin.plan.spec import NodeConfig


def model_of(fields: Mapping[str, object]) -> ModelConfig:
    """Return the model of a checkpoint's config.json. Raises ConfigError as for a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        return load_model_config(Path(folder))


def table_of(model: ModelConfig) -> ExpertTable:
    """Return the expert table of one node, which holds all experts."""
    assert model.moe is not None
    return uniform_table(
        num_layers=len(model.moe_layers), num_experts=model.moe.num_experts, num_nodes=1
    )


class Rig:
    """The settings of both nodes, and their parts, each made when it is asked for.

    `config` is the attention node's; the expert node computes on the same device by the same
    kernels. Starts no threads of its own, so that a fork may serve with parts of its parent.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: NodeConfig,
        path: Path | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        """`path` is the checkpoint, None: weights are random; of either, the layers of `model`.

        `runtime` None: that of the configured device.
        """
        self.model, self.config = model, config
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.runtime = runtime or open_runtime(config.node.device, config.node.kernels)
        self._path = path
        self._random = RandomWeights(model, device=self.runtime.device, dtype=self.dtype)

    def decoder(self, num_blocks: int) -> Decoder:
        """Return the attention half of every layer, with a cache of `num_blocks` blocks."""
        cache = kv_cache.of_blocks(
            kv_cache.layer_specs(self.model, self.dtype, self.config.kv_cache),
            num_blocks,
            block_size=self.config.kv_cache.block_size,
            runtime=self.runtime,
        )
        # Pages that were never written are one page, which stays in a processor's caches.
        for each in (*cache.keys, *cache.values):
            each.fill_(0.01)
        return Decoder(
            self.model,
            self._attention_weights(),
            self._ops("attention"),
            cache,
            precision=self.config.precision,
        )

    def runner(self, decoder: Decoder) -> ModelRunner:
        """Return the attention node of `decoder`."""
        return ModelRunner(self.model, decoder, decoder.kv.num_blocks, self.config, self.runtime)

    def batch(self, blocks: Sequence[int]) -> Batch:
        """Return the steps of sequences in these blocks of a cache."""
        block_size = self.config.kv_cache.block_size
        return Batch(blocks, block_size=block_size, vocab_size=self.model.vocab_size)

    def experts(self, *, counts: bool = True) -> Experts:
        """Return the expert node; without `counts` the uses of its experts are not counted."""
        return Experts(
            self.model,
            self._expert_weights(),
            self._ops("expert"),
            held=table_of(self.model).experts_of(0),
            per_expert_answers=self.config.execution.deterministic,
            runtime=self.runtime,
            counts=counts,
            precision=self.config.precision,
        )

    def device_net(self, runner: ModelRunner, serve: Serve) -> DeviceNet:
        """Return the net of both nodes in one process, on one device; `serve`: Experts.compute."""
        return DeviceNet(
            self.runtime,
            runner.net_shape(self.config),
            index=0,
            serves=[serve],
            table=table_of(self.model),
        )

    def _attention_weights(self) -> AttentionWeights:
        if self._path is None:
            return self._random.attention()
        return stream_attention_weights(
            Checkpoint(self._path),
            self.model,
            dtype=self.dtype,
            device=self.runtime.device,
            precision=self.config.precision,
        )

    def _expert_weights(self) -> Iterator[ExpertStream]:
        if self._path is None:
            return self._random.experts()
        return stream_expert_weights(
            Checkpoint(self._path),
            self.model,
            dtype=self.dtype,
            experts=table_of(self.model).experts_of(0),
            device=self.runtime.device,
            precision=self.config.precision,
        )

    def _ops(self, role: NodeRole) -> Ops:
        node = self.config.node
        return select_ops(
            node.kernels, self.dtype, formats(self.config.precision, role), node.device
        )
