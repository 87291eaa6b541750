"""Makes the runner of an attention node from a checkpoint.

Owns the order: weights, a cache of the configured size or of what a dry run of the largest steps
leaves free (memory_budget.py), then the runner, warmed up. Knows no step. Called by worker.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from attention_nodes.grammars.processes import Grammars
from attention_nodes.local_experts import ColocatedExperts
from attention_nodes.long_contexts.spilling import bytes_beside, spilled_blocks, without_spill
from attention_nodes.memory_budget import (
    blocks_to_allocate,
    fitting,
    largest_steps,
    measure,
    window_bytes,
)
from attention_nodes.step import kv_cache
from attention_nodes.step.absent_experts import AbsentExperts
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.drafts import RowDrafter
from attention_nodes.step.model_runner import ModelRunner
from attention_nodes.step.slow_decoder import SlowDecoder
from kernels.dispatch import select_ops
from kernels.experts.layers import rows_to_warm_up
from kernels.runtime import open_runtime
from m2n_comm.net import AttentionNet
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.unused_tensors import describe_unused, unused_tensors
from models.checkpoints.weights import stream_attention_weights
from models.description.config import ModelConfig, load_model_config
from spec_decode.draft import Drafter
from topspin.plan.kv_cache import BlockNeeds, block_needs
from topspin.plan.precision import formats
from topspin.plan.spec import NodeConfig
from topspin.process import release_freed_memory

_log = logging.getLogger("attention")

OpenDryNet = Callable[[ModelRunner], AttentionNet]
"""Returns the net from a runner that is still loading to the experts of its process."""


def load_runner(
    path: Path,
    config: NodeConfig,
    *,
    index: int = 0,
    table_version: int = 1,
    open_net: OpenDryNet | None = None,
    drafter: Drafter | None = None,
    grammars: Grammars | None = None,
) -> ModelRunner:
    """Read the attention role's weights from `path`, allocate the cache, warm up.

    Without a configured cache size (on a GPU) the cache takes the memory that a dry run, as
    attention node `index`, leaves free. `open_net` returns the net of that run if experts
    compute on this device, in this process; they must be loaded by then. None: they are
    elsewhere.
    """
    if config.node.num_threads is not None:
        torch.set_num_threads(config.node.num_threads)
    runtime = open_runtime(config.node.device, config.node.kernels)
    model = load_model_config(path, config.model.hf_overrides)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    max_len, needs = config.model.max_model_len, needs_of(config, model)
    own = held_layers(config, model)
    layers = kv_cache.layer_specs(model, dtype, config.kv_cache, max_len=max_len)
    layers = layers[own.start : own.stop]
    block_bytes = kv_cache.bytes_per_block(layers, block_size=needs.block_size)
    num_assigned = spilled_blocks(config, layers)
    code_bytes = bytes_beside(model, config, layers)
    cache = kv_cache.allocate(
        layers,
        needs=needs,
        size_bytes=config.attention.kv_cache_bytes,
        max_len=max_len,
        runtime=runtime,
        code_bytes=code_bytes,
    )
    packed = formats(config.precision, "attention")
    if config.local_layers:
        packed |= formats(config.precision, "expert")
    ops = select_ops(config.node.kernels, dtype, packed, config.node.device)
    checkpoint = Checkpoint(path)
    with fitting(runtime, "the weights of attention"):
        weights = stream_attention_weights(
            checkpoint,
            model,
            dtype=dtype,
            device=runtime.device,
            precision=config.precision,
            layers=own,
        )
        slow = config.node.slow
        make = Decoder if slow == 1 else partial(SlowDecoder, slow=slow)
        decoder = make(model, weights, ops, cache, precision=config.precision)
        if config.local_layers:
            decoder.experts = ColocatedExperts.load(
                checkpoint,
                model,
                ops,
                runtime,
                layers=config.local_layers,
                dtype=dtype,
                precision=config.precision,
                per_expert=config.execution.deterministic,
            )
    unused = unused_tensors(checkpoint.names, model, read=checkpoint.tensors_read)
    if unused and len(own) == model.num_layers:
        _log.warning("%s: config.json leaves unused %s", path, describe_unused(unused))
    if model.num_mtp_layers and not isinstance(drafter, RowDrafter):
        _log.info(
            "%s: its head of multi-token prediction is not read: nothing drafts with it", path
        )
    if config.attention.kv_cache_bytes is None or runtime.is_asynchronous:
        dry = ModelRunner(model, decoder, cache.num_blocks, without_spill(config), runtime)
        rehearse = partial(
            _rehearse, dry, config, index=index, table_version=table_version, open_net=open_net
        )
        if config.attention.kv_cache_bytes is None:
            num_graphs = dry.num_recordings
            if config.num_experts and open_net is None and config.link.transport != "cuda_ipc":
                num_graphs = 0  # the host takes part in every layer
            use = measure(
                runtime,
                rehearse,
                num_graphs=num_graphs,
                windows=window_bytes(config, dry.net_shape(config)) if config.num_experts else 0,
            )
            num_blocks = blocks_to_allocate(
                use,
                utilization=config.attention.gpu_memory_utilization,
                block_bytes=block_bytes,
                needs=needs,
                max_len=max_len,
                code_bytes=code_bytes,
            )
            del dry, rehearse
            decoder.kv = kv_cache.of_blocks(
                layers,
                num_blocks,
                block_size=needs.block_size,
                runtime=runtime,
                num_groups=len(needs.windows),
            )
        else:
            rehearse()
            del dry, rehearse
    decoder.codes = {}  # a dry run's, whose memory the next ones take
    num_blocks = decoder.kv.num_blocks if num_assigned is None else num_assigned
    runner = ModelRunner(model, decoder, num_blocks, config, runtime, drafter, grammars)
    runner.warm_up()
    if decoder.experts is not None:
        most = config.attention.max_num_batched_tokens
        decoder.experts.warm_up(rows_to_warm_up(most) if runtime.is_asynchronous else (1,))
    if config.execution.recordings:
        runtime.prepare_capture()
    release_freed_memory()
    return runner


def held_layers(config: NodeConfig, model: ModelConfig) -> range:
    """Return the decoder layers of a node."""
    return range(*(config.node.layers or (0, model.num_layers)))


def needs_of(config: NodeConfig, model: ModelConfig) -> BlockNeeds:
    """Return how many blocks a sequence needs on a node."""
    return block_needs(
        model.windows,
        config.kv_cache,
        max_len=config.model.max_model_len,
        max_step_tokens=config.attention.max_num_batched_tokens,
    )


def _rehearse(
    runner: ModelRunner,
    config: NodeConfig,
    *,
    index: int,
    table_version: int,
    open_net: OpenDryNet | None,
) -> None:
    """Run the largest steps to compile their kernels, so that no request waits for that."""
    net: AttentionNet | None = None
    if config.num_experts:
        net = AbsentExperts(runner.local_layers) if open_net is None else open_net(runner)
    with fitting(runner.runtime, "a step of --max-num-batched-tokens or --max-num-seqs"):
        for plan in largest_steps(
            config, index=index, table_version=table_version, num_groups=runner.num_groups
        ):
            runner.execute(plan, net, index=index)
        runner.warm_up_largest(config)
    if net is not None:
        net.close()
