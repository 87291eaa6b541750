"""One attention node and its experts on one device, without a checkpoint and without sockets.

Owns what benchmarks.gpu.decode times: the nodes of deploy.rig, as `topspin serve --transport local`
joins them on a GPU, over random weights and random cached keys and values, two steps at a time. On
the CPU the same runs under Triton's interpreter, for tests.

The experts that a step touched are read after it from its computed slots, in the memory where
the step or its recording has written them, so the step itself takes no longer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from attention_nodes.step import kv_cache
from attention_nodes.step.model_runner import MAX_LAUNCHED
from benchmarks.gpu.workload import Workload
from benchmarks.kernels.byte_floor import decode_floor
from deploy.rig.nodes import Rig, model_of
from kernels.runtime import DeviceMemory, Runtime, open_runtime
from m2n_comm.net import ExpertBatch
from models.description.config import ModelConfig
from models.description.facts import facts_of
from topspin.errors import ConfigError
from topspin.messages import StepPlan, StepResult
from topspin.plan.from_flags import resolve
from topspin.plan.settings import TraceSection
from topspin.plan.spec import NodeConfig

BLOCK_SIZE = 16
SEED = 0
CONTEXT_STEP = 256
KEPT_SHARE = 0.93
"""The share of free memory for weights and keys; activations and graphs have the rest."""


@dataclass(eq=False)
class _Pass:
    """One run of a step's layers by the host: the slots [T, K] of each layer."""

    is_recorded: bool
    """Whether it can be run again without the host."""
    slots: dict[int, Tensor] = field(default_factory=dict)


class Touched:
    """Keeps the slots of the last step, whether the host ran it or a recording was replayed.

    A recording's slots keep their memory as long as they are referenced, and each replay overwrites
    them. Those of every size of step are kept.
    """

    def __init__(self, is_recording: Callable[[], bool]) -> None:
        self._is_recording = is_recording
        self._recorded: dict[int, _Pass] = {}
        self._last: _Pass | None = None

    def watch(self, compute: Callable[[ExpertBatch], Tensor]) -> Callable[[ExpertBatch], Tensor]:
        """Return `compute` with a record of its batches' slots."""

        def serve(batch: ExpertBatch) -> Tensor:
            if batch.layer == 0:
                self._last = _Pass(self._is_recording())
            assert self._last is not None
            self._last.slots[batch.layer] = batch.slots
            if self._last.is_recorded:
                self._recorded[len(batch.slots)] = self._last
            return compute(batch)

        return serve

    def begin_step(self) -> None:
        """Forget the previous step; recordings stay."""
        self._last = None

    def counts(self, rows: int) -> list[int]:
        """Return the number of different slots that the last step touched, per layer.

        `rows` are the step's rows without padding. Reads from the device.
        """
        step = self._last
        if step is None:
            # The host did not run it: the step was a replay of the smallest recording that fits.
            fitting = [size for size in self._recorded if size >= rows]
            assert fitting, f"no step of {rows} rows was recorded"
            step = self._recorded[min(fitting)]
        touched = [set(slots.flatten().tolist()) for _, slots in sorted(step.slots.items())]
        return [len(slots - {-1}) for slots in touched]


class GpuEngine:
    """One model with random weights on one device, greedy, as a node runs it."""

    def __init__(self, model: ModelConfig, config: NodeConfig, runtime: Runtime) -> None:
        """Draw the weights and fill the cache; `config` is an attention node's, resolved."""
        self.model = model
        self._rig = rig = Rig(model, config, runtime=runtime)
        block_bytes = kv_cache.bytes_per_block(
            kv_cache.layer_specs(model, rig.dtype), block_size=BLOCK_SIZE
        )
        assert config.attention.kv_cache_bytes is not None, "just enough for the workload"
        num_blocks = config.attention.kv_cache_bytes // block_bytes
        with torch.inference_mode():
            decoder, experts = rig.decoder(num_blocks), rig.experts(counts=False)
            generator = torch.Generator(runtime.device).manual_seed(SEED)
            for cached in (*decoder.kv.keys, *decoder.kv.values):
                cached.normal_(generator=generator)
        self._runner = rig.runner(decoder)
        self._touched = Touched(_recording_on(runtime))
        self._net = rig.device_net(self._runner, self._touched.watch(experts.compute))
        # In random order, as after a while of serving.
        blocks = np.random.default_rng(SEED).permutation(num_blocks).tolist()
        self._batch = rig.batch(blocks)
        self._rows = 0
        self.last_result: StepResult | None = None

    def start_decode(self, batch: int, context: int) -> None:
        """Drop all sequences and begin `batch` new ones with `context` positions cached."""
        self.finish()
        self._batch.begin(batch, context, growth=self._room(batch) - context - 1)

    def decode_step(self) -> None:
        """Launch one step of all sequences; the one before it may still be running."""
        self._launch(self._batch.decode())

    def prefill(self, num_tokens: int) -> None:
        """Drop all sequences and launch the prefill of one prompt of `num_tokens` tokens."""
        most = self._rig.config.attention.max_num_batched_tokens
        growth = self._room(1) - num_tokens
        for plan in self._batch.prefill(num_tokens, most=most, growth=growth):
            self._launch(plan)

    def _room(self, batch: int) -> int:
        """Return the positions that each of `batch` sequences may have."""
        blocks = self._runner.num_blocks // batch
        return min(blocks * BLOCK_SIZE, self._rig.config.model.max_model_len)

    def finish(self) -> None:
        """Wait until all launched steps have completed and their tokens are on the host."""
        while self._runner.num_launched:
            self.last_result = self._runner.collect()

    def decode_floor(self) -> Mapping[str, float]:
        """Return the bytes that a step like the last one must move; see byte_floor."""
        self.finish()
        return decode_floor(
            self.model,
            itemsize=self._rig.dtype.itemsize,
            touched=self._touched.counts(self._rows),
            contexts=self._batch.contexts,
        )

    def close(self) -> None:
        """Free the device's memory."""
        self.finish()
        self._net.close()
        del self._runner, self._net, self._touched
        gc.collect()
        if self._rig.runtime.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> None:
        while self._runner.num_launched >= MAX_LAUNCHED:
            self.last_result = self._runner.collect()
        self._touched.begin_step()
        self._rows = sum(len(each.wanted) for each in plan.micro_batches)
        self._runner.launch(plan, self._net, index=0)


def _recording_on(runtime: Runtime) -> Callable[[], bool]:
    """Return a test for a recording in progress; on the CPU the host runs every replay."""
    if runtime.device.type == "cuda":
        return torch.cuda.is_current_stream_capturing
    return lambda: False


def node_config(
    model: ModelConfig, workload: Workload, device: str, *, cuda_graphs: bool
) -> NodeConfig:
    """Return the settings of a node with just enough cache for `workload`."""
    assert model.moe is not None
    per_sequence = -(-workload.max_len // BLOCK_SIZE)
    num_blocks = max(
        max(workload.batches) * per_sequence, -(-workload.prefill_tokens // BLOCK_SIZE), 2
    )
    dtype: Literal["float32", "bfloat16"] = "float32" if model.dtype == "float32" else "bfloat16"
    block_bytes = kv_cache.bytes_per_block(
        kv_cache.layer_specs(model, getattr(torch, dtype)), block_size=BLOCK_SIZE
    )
    return resolve(
        facts_of(model),
        path="random",
        dtype=dtype,
        max_model_len=max(workload.max_len, workload.prefill_tokens) + 1,
        max_num_seqs=max(workload.batches),
        max_num_batched_tokens=max(workload.prefill_tokens, *workload.batches),
        block_size=BLOCK_SIZE,
        kv_cache_bytes=num_blocks * block_bytes,
        kernels="triton",
        attention_device=device,
        expert_device=device,
        recordings=cuda_graphs,
        trace=TraceSection(enabled=False),
    ).for_node()


def fitting(workload: Workload, memory: DeviceMemory) -> Workload:
    """Return `workload` with as much of its context as fits beside the weights in free `memory`.

    Raises ConfigError if the weights alone leave no room for a context.
    """
    model = model_of(workload.fields)
    assert model.moe is not None
    itemsize = 4 if model.dtype == "float32" else 2
    embeddings = model.vocab_size * model.hidden_size * itemsize
    for context in range(workload.context, 0, -CONTEXT_STEP):
        fitted = replace(workload, context=context)
        kept = decode_floor(
            model,
            itemsize=itemsize,
            touched=[model.moe.num_experts] * len(model.moe_layers),
            contexts=[fitted.max_len] * max(workload.batches),
        )
        if embeddings + sum(kept.values()) <= KEPT_SHARE * (memory.free + memory.cached):
            return fitted
    raise ConfigError(
        f"{workload.name}: {memory.free / 2**30:.1f} GiB of the device are free, which its weights "
        "and keys do not fit; give fewer sequences with --batch"
    )


def open_engine(workload: Workload, device: str, *, cuda_graphs: bool) -> GpuEngine:
    """Build the engine of a workload. Raises ConfigError if the machine cannot run it."""
    model = model_of(workload.fields)
    config = node_config(model, workload, device, cuda_graphs=cuda_graphs)
    return GpuEngine(model, config, open_runtime(config.node.device))
