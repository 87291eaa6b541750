"""One attention node and its experts on one device, without a checkpoint and without sockets.

Owns the composition that benchmarks.gpu.decode times: the nodes' ModelRunner, Experts and
DeviceNet, as `topspin serve --transport local` joins them on a GPU, over random weights and
random cached keys and values; only the scheduler is a simple one (benchmarks.gpu.plans). On the
CPU the same runs under Triton's interpreter, for tests.

The experts that a step touched are read after it from its computed slots, in the memory where
the step or its recording has written them, so the step itself takes no longer.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from attention_nodes.step import kv_cache
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.model_runner import MAX_LAUNCHED, ModelRunner
from benchmarks.gpu.plans import Plans
from benchmarks.gpu.weights import RandomWeights
from benchmarks.gpu.workload import Fields, Variant, Workload
from benchmarks.kernels.byte_floor import decode_floor
from expert_nodes.experts import Experts
from kernels.dispatch import select_ops
from kernels.runtime import DeviceMemory, Runtime, open_runtime
from m2n_comm.gpu.local import DeviceNet
from m2n_comm.net import ExpertBatch, NetShape
from models.description.config import ModelConfig, load_model_config
from topspin.errors import ConfigError
from topspin.expert_table import uniform_table
from topspin.messages import StepPlan, StepResult
from topspin.plan.from_flags import resolve
from topspin.plan.model_facts import ModelFacts
from topspin.plan.settings import TraceSection
from topspin.plan.spec import NodeConfig

BLOCK_SIZE = 16
SEED = 0
CONTEXT_STEP = 256
KEPT_SHARE = 0.93
"""The share of free memory for weights and keys; activations and graphs have the rest."""


@dataclass(eq=False)
class _Pass:
    """One run of a step's layers by the host: the slots [T, K] of each layer, micro-batch."""

    is_recorded: bool
    """Whether it can be run again without the host."""
    slots: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def rows(self) -> tuple[int, ...]:
        """Return the rows of each micro-batch, padding included."""
        return tuple(len(slots) for (layer, _), slots in sorted(self.slots.items()) if layer == 0)


class Touched:
    """Keeps the slots of the last step, whether the host ran it or a recording was replayed.

    A recording's slots keep their memory as long as they are referenced, and each replay overwrites
    them. Those of every size of step are kept.
    """

    def __init__(self, is_recording: Callable[[], bool]) -> None:
        self._is_recording = is_recording
        self._recorded: dict[tuple[int, ...], _Pass] = {}
        self._last: _Pass | None = None

    def watch(self, compute: Callable[[ExpertBatch], Tensor]) -> Callable[[ExpertBatch], Tensor]:
        """Return `compute` with a record of its batches' slots."""

        def serve(batch: ExpertBatch) -> Tensor:
            if batch.layer == 0 and batch.micro_batch == 0:
                self._last = _Pass(self._is_recording())
            assert self._last is not None
            self._last.slots[batch.layer, batch.micro_batch] = batch.slots
            if self._last.is_recorded:
                self._recorded[self._last.rows()] = self._last
            return compute(batch)

        return serve

    def begin_step(self) -> None:
        """Forget the previous step; recordings stay."""
        self._last = None

    def counts(self, rows: tuple[int, ...]) -> list[int]:
        """Return the number of different slots that the last step touched, per layer.

        `rows` are the micro-batches' rows without padding. Reads from the device.
        """
        step = self._last
        if step is None:
            # The host did not run it: the step was a replay of the smallest recording that fits.
            fitting = [
                size
                for size in self._recorded
                if len(size) == len(rows) and all(a >= b for a, b in zip(size, rows, strict=True))
            ]
            assert fitting, f"no step of {rows} rows was recorded"
            step = self._recorded[min(fitting)]
        by_layer: dict[int, set[int]] = {}
        for (layer, _), slots in step.slots.items():
            by_layer.setdefault(layer, set()).update(slots.flatten().tolist())
        return [len(by_layer[layer] - {-1}) for layer in sorted(by_layer)]


class GpuEngine:
    """One model with random weights on one device, greedy, as a node runs it."""

    def __init__(
        self, model: ModelConfig, config: NodeConfig, runtime: Runtime, *, num_micro_batches: int
    ) -> None:
        """Draw the weights and fill the cache; `config` is an attention node's, resolved."""
        self.model = model
        self._runtime = runtime
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._itemsize = dtype.itemsize
        ops = select_ops(
            config.node.kernels,
            dtype,
            device=config.node.device,
        )
        assert model.moe is not None
        with torch.inference_mode():
            weights = RandomWeights(model, device=runtime.device, dtype=dtype, seed=SEED)
            cache = kv_cache.allocate(
                kv_cache.layer_specs(model, dtype),
                block_size=config.kv_cache.block_size,
                size_bytes=config.attention.kv_cache_bytes,
                max_len=config.model.max_model_len,
                runtime=runtime,
            )
            decoder = Decoder(model, weights.attention(), ops, cache)
            everyone = tuple(range(model.moe.num_experts))
            experts = Experts(
                model,
                weights.experts(),
                ops,
                held=[everyone] * len(model.moe_layers),
                runtime=runtime,
                counts=False,
            )
            generator = torch.Generator(runtime.device).manual_seed(SEED)
            for cached in (*cache.keys, *cache.values):
                cached.normal_(generator=generator)
        self._runner = ModelRunner(model, decoder, cache.num_blocks, config, runtime)
        self._touched = Touched(_recording_on(runtime))
        self._net = DeviceNet(
            runtime,
            NetShape.from_config(
                config,
                hidden_size=model.hidden_size,
                top_k=model.moe.top_k,
                num_layers=len(model.moe_layers),
            ),
            index=0,
            serves=[self._touched.watch(experts.compute)],
            table=uniform_table(
                num_layers=len(model.moe_layers), num_experts=model.moe.num_experts, num_nodes=1
            ),
            num_streams=config.execution.gpu_streams,
        )
        self._plans = Plans(
            block_size=config.kv_cache.block_size,
            num_blocks=cache.num_blocks,
            vocab_size=model.vocab_size,
            max_tokens=config.attention.max_num_batched_tokens,
            num_micro_batches=num_micro_batches,
            seed=SEED,
        )
        self.last_result: StepResult | None = None

    def start_decode(self, batch: int, context: int) -> None:
        """Drop all sequences and begin `batch` new ones with `context` positions cached."""
        self.finish()
        self._plans.start_decode(batch, context)

    def decode_step(self) -> None:
        """Launch one step of all sequences; the one before it may still be running."""
        self._launch(self._plans.decode())

    def prefill(self, num_tokens: int) -> None:
        """Drop all sequences and launch the prefill of one prompt of `num_tokens` tokens."""
        for plan in self._plans.prefill(num_tokens):
            self._launch(plan)

    def finish(self) -> None:
        """Wait until all launched steps have completed and their tokens are on the host."""
        while self._runner.num_launched:
            self.last_result = self._runner.collect()

    def decode_floor(self) -> Mapping[str, float]:
        """Return the bytes that a step like the last one must move; see byte_floor."""
        self.finish()
        return decode_floor(
            self.model,
            itemsize=self._itemsize,
            touched=self._touched.counts(self._plans.rows),
            contexts=self._plans.contexts,
        )

    def close(self) -> None:
        """Free the device's memory."""
        self.finish()
        self._net.close()
        del self._runner, self._net, self._touched
        gc.collect()
        if self._runtime.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> None:
        while self._runner.num_launched >= MAX_LAUNCHED:
            self.last_result = self._runner.collect()
        self._touched.begin_step()
        self._runner.launch(plan, self._net, index=0)


def _recording_on(runtime: Runtime) -> Callable[[], bool]:
    """Return a test for a recording in progress; on the CPU the host runs every replay."""
    if runtime.device.type == "cuda":
        return torch.cuda.is_current_stream_capturing
    return lambda: False


def read_fields(fields: Fields) -> ModelConfig:
    """Return the model of a checkpoint's config.json. Raises ConfigError as for a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        return load_model_config(Path(folder))


def node_config(
    model: ModelConfig, workload: Workload, device: str, variant: Variant
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
    facts = ModelFacts(
        dtype=model.dtype,
        max_positions=model.context_length,
        num_layers=model.num_layers,
        moe_layers=tuple(model.moe_layers),
        num_experts=0 if model.moe is None else model.moe.num_experts,
    )
    return resolve(
        facts,
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
        recordings=variant.cuda_graphs,
        gpu_streams=variant.gpu_streams,
        trace=TraceSection(enabled=False),
    ).for_node()


def fitting(workload: Workload, memory: DeviceMemory) -> Workload:
    """Return `workload` with as much of its context as fits beside the weights in free `memory`.

    Raises ConfigError if the weights alone leave no room for a context.
    """
    model = read_fields(workload.fields)
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


def open_engine(workload: Workload, device: str, variant: Variant) -> GpuEngine:
    """Build the engine of one variant. Raises ConfigError if the machine cannot run it."""
    model = read_fields(workload.fields)
    config = node_config(model, workload, device, variant)
    runtime = open_runtime(config.node.device)
    # With two streams the experts of one half overlap with the attention of the other half.
    return GpuEngine(model, config, runtime, num_micro_batches=variant.gpu_streams)
