"""A whole model in this process, for benchmarks that time or watch its steps.

Owns the weights, all experts and one KV cache, and makes nodes of them (deploy.rig): attention
nodes that share these (the net of one process), each with its own sequences and perhaps retrieval.
Sequences never end by themselves. Its caller says which blocks a sequence has and what a step
computes. Called by benchmarks.kernels.step and benchmarks.retrieval_*.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from attention_nodes.step.decoder import Decoder
from deploy.rig.nodes import Rig
from deploy.rig.steps import Steps
from kernels.dispatch import Ops
from models.description.config import load_model_config
from models.description.facts import facts_of
from topspin.messages import StepResult
from topspin.plan.from_flags import resolve
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.precision import Format, PrecisionRule
from topspin.plan.retrieval import RetrievalPolicy
from topspin.plan.settings import TraceSection
from topspin.plan.spec import NodeConfig
from topspin.plan.speculation import OFF

BLOCK_SIZE: Final = 16
CODED: Final = KvCacheSpec(block_size=BLOCK_SIZE, retrieval=RetrievalPolicy(num_tokens=512))


class LocalModel:
    """What the nodes of this process share; blocks are BLOCK_SIZE tokens."""

    def __init__(
        self,
        path: Path,
        *,
        num_blocks: int,
        max_len: int | None = None,
        quantization: Format | None = None,
        rules: Sequence[PrecisionRule] = (),
        num_threads: int | None = None,
    ) -> None:
        """Load `path`, a model with experts, and allocate its cache.

        `quantization` None: as the checkpoint is. A `max_len` beyond the model's own limit lets
        sequences have positions that it was not trained for: good for times, not for text.
        """
        model = load_model_config(path)
        assert model.moe is not None, "a model with experts"
        length = max(model.max_position_embeddings, max_len or 0)
        self.config = dataclasses.replace(model, max_position_embeddings=length)
        self._path, self._quantization, self._rules = path, quantization, tuple(rules)
        self._num_threads = num_threads
        config = self._node_config(None, recordings=True)
        if config.node.num_threads is not None:
            torch.set_num_threads(config.node.num_threads)
        # Some of its nodes retrieve.
        rig = Rig(self.config, msgspec.structs.replace(config, kv_cache=CODED), path)
        self.decoder, self.experts = rig.decoder(num_blocks), rig.experts()

    def node(
        self,
        retrieval_tokens: int | None = None,
        *,
        recordings: bool = True,
        ops: Ops | None = None,
    ) -> Node:
        """Return a node that retrieves so many keys (None: dense), by `ops` if given."""
        decoder = copy.copy(self.decoder)
        if ops is not None:
            decoder.ops = ops
        return Node(self, decoder, self._node_config(retrieval_tokens, recordings=recordings))

    def _node_config(self, retrieval_tokens: int | None, *, recordings: bool) -> NodeConfig:
        plan = resolve(
            facts_of(self.config, self._path),
            path=str(self._path),
            dtype="bfloat16",
            quantization=self._quantization,
            block_size=BLOCK_SIZE,
            kv_retrieval_tokens=retrieval_tokens,
            transport="local",
            layout="shared",
            num_threads=self._num_threads,
            recordings=recordings,
            speculation=OFF,
            trace=TraceSection(enabled=False),
        )
        return msgspec.structs.replace(plan, precision=(*plan.precision, *self._rules)).for_node()


class Node:
    """An attention node of a LocalModel, and the experts behind it."""

    def __init__(self, model: LocalModel, decoder: Decoder, config: NodeConfig) -> None:
        rig = Rig(model.config, config)
        self.runtime = rig.runtime
        self.runtime.prepare_capture()
        self.chunk = config.attention.max_num_batched_tokens
        """The most tokens of a step."""
        self._runner = rig.runner(decoder)
        self._net = rig.device_net(self._runner, model.experts.compute)
        self._steps = Steps()

    def admit(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        num_computed: int = 0,
        num_prompt: int | None = None,
        temperature: float = 0.0,
    ) -> int:
        """Begin a sequence with the next step and return its id; it may fill its blocks.

        The first `num_computed` tokens are in the cache. `num_prompt` None: all are prompt.
        """
        return self._steps.admit(
            tokens,
            blocks,
            # The last token that is sampled is in no block.
            max_length=len(blocks) * BLOCK_SIZE + 1,
            num_computed=num_computed,
            num_prompt=num_prompt,
            temperature=temperature,
        )

    def end(self, seq_id: int) -> None:
        """End a sequence with the next step."""
        self._steps.end(seq_id)

    def step(self, counts: Mapping[int, int], *, sample: bool = True) -> tuple[float, StepResult]:
        """Advance sequences by so many tokens; returns the step's seconds and its result."""
        plan = self._steps.advance(counts, sample=sample)
        started = time.perf_counter()
        result = self._runner.execute(plan, self._net, index=0)
        return time.perf_counter() - started, result
