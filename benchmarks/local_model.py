"""A whole model in this process, for benchmarks that time or watch its steps.

Owns the weights, all experts and one KV cache, and makes nodes of them: attention nodes that share
these (the net of one process), each with its own sequences and perhaps retrieval. Sequences never
end by themselves. Knows no scheduler: its caller says which blocks a sequence has and what a step
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

from attention_nodes.step import kv_cache
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.model_runner import ModelRunner
from expert_nodes.experts import Experts
from kernels.dispatch import Ops, select_ops
from kernels.runtime import open_runtime
from m2n_comm.gpu.local import DeviceNet
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.weights import stream_attention_weights, stream_expert_weights
from models.description.config import load_model_config
from models.description.facts import facts_of
from topspin.expert_table import uniform_table
from topspin.messages import (
    SAMPLE,
    MicroBatch,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepResult,
    StepTicket,
    pack_ints,
)
from topspin.plan.from_flags import resolve
from topspin.plan.kv_cache import KvCacheSpec
from topspin.plan.precision import Format, PrecisionRule, formats
from topspin.plan.retrieval import RetrievalPolicy
from topspin.plan.settings import TraceSection
from topspin.plan.spec import NodeConfig

BLOCK_SIZE: Final = 16
CODED: Final = KvCacheSpec(retrieval=RetrievalPolicy(num_tokens=512))


class LocalModel:
    """What the nodes of this process share; blocks are BLOCK_SIZE tokens."""

    def __init__(
        self,
        path: Path,
        *,
        num_blocks: int,
        max_len: int | None = None,
        quantization: Format = "none",
        rules: Sequence[PrecisionRule] = (),
        num_threads: int | None = None,
    ) -> None:
        """Load `path`, a model with experts, and allocate its cache.

        A `max_len` beyond the model's own limit lets sequences have positions that it was not
        trained for: good for times, not for text.
        """
        model = load_model_config(path)
        assert model.moe is not None, "a model with experts"
        length = max(model.max_position_embeddings, max_len or 0)
        self.config = dataclasses.replace(model, max_position_embeddings=length)
        self._path, self._quantization, self._rules = path, quantization, tuple(rules)
        self._num_threads, self.num_blocks = num_threads, num_blocks
        config = self._node_config(None, recordings=True)
        if config.node.num_threads is not None:
            torch.set_num_threads(config.node.num_threads)
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        checkpoint = Checkpoint(path)
        self.decoder = Decoder(
            self.config,
            stream_attention_weights(checkpoint, self.config, dtype=dtype),
            select_ops(config.node.kernels, dtype, formats(config.precision, "attention")),
            kv_cache.of_blocks(
                kv_cache.layer_specs(self.config, dtype, CODED), num_blocks, block_size=BLOCK_SIZE
            ),
            precision=config.precision,
        )
        self.table = uniform_table(
            num_layers=len(model.moe_layers), num_experts=model.moe.num_experts, num_nodes=1
        )
        held = self.table.experts_of(0)
        self.experts = Experts(
            self.config,
            stream_expert_weights(checkpoint, self.config, dtype=dtype, experts=held),
            select_ops(config.node.kernels, dtype, formats(config.precision, "expert")),
            held=held,
            precision=config.precision,
        )

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
            trace=TraceSection(enabled=False),
        )
        return msgspec.structs.replace(plan, precision=(*plan.precision, *self._rules)).for_node()


class Node:
    """An attention node of a LocalModel, and the experts behind it."""

    def __init__(self, model: LocalModel, decoder: Decoder, config: NodeConfig) -> None:
        self.runtime = open_runtime(config.node.device, config.node.kernels)
        self.runtime.prepare_capture()
        self.chunk = config.attention.max_num_batched_tokens
        """The most tokens of a step."""
        runner = ModelRunner(model.config, decoder, model.num_blocks, config, self.runtime)
        self._runner = runner
        self._net = DeviceNet(
            self.runtime,
            runner.net_shape(config),
            index=0,
            serves=[model.experts.compute],
            table=model.table,
        )
        self._num_steps = self._num_admitted = 0
        self._new: list[NewSequence] = []
        self._finished: list[int] = []

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
        seq_id = self._num_admitted
        self._num_admitted += 1
        # The last token that is sampled is in no block.
        length = len(blocks) * BLOCK_SIZE + 1
        self._new.append(
            NewSequence(
                seq_id=seq_id,
                tokens=pack_ints(tokens),
                num_prompt_tokens=num_prompt or len(tokens),
                num_computed=num_computed,
                blocks=pack_ints(blocks),
                max_length=length,
                sampling=SamplingParams(max_tokens=length, seed=seq_id, temperature=temperature),
            )
        )
        return seq_id

    def end(self, seq_id: int) -> None:
        """End a sequence with the next step."""
        self._finished.append(seq_id)

    def step(self, counts: Mapping[int, int], *, sample: bool = True) -> tuple[float, StepResult]:
        """Advance sequences by so many tokens; returns the step's seconds and its result."""
        self._num_steps += 1
        num_seqs, num_tokens = len(counts), sum(counts.values())
        plan = StepPlan(
            ticket=StepTicket(
                step=self._num_steps,
                previous=self._num_steps - 1,
                generation=1,
                table_version=1,
                num_micro_batches=1,
                participants=(0,),
                row_buckets=(num_tokens,),
            ),
            finished=pack_ints(self._finished),
            new=tuple(self._new),
            micro_batches=(
                MicroBatch(
                    seq_ids=pack_ints(counts),
                    num_tokens=pack_ints(counts.values()),
                    wanted=bytes([SAMPLE if sample else 0] * num_seqs),
                    block_counts=pack_ints([0] * num_seqs),
                    block_ids=b"",
                ),
            ),
        )
        self._new, self._finished = [], []
        started = time.perf_counter()
        result = self._runner.execute(plan, self._net, index=0)
        return time.perf_counter() - started, result
