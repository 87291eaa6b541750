"""The number of KV cache blocks that fit on a GPU: measured by a dry run of the largest steps.

Owns the steps of that run, the measurements and the arithmetic. The layers need the most memory
for a prompt that fills the token budget; the sampler for all sequences with every filter. Both
run on two blocks, which all sequences write to: only sizes matter.
Knows no weights. Called by loading.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

import torch

from attention_nodes.step.kv_cache import MIN_BLOCKS, blocks_within
from kernels.runtime import Runtime
from m2n_comm.gpu.ipc_pairs import inbox_bytes
from m2n_comm.gpu.memory import whole_pages
from m2n_comm.net import NetShape
from topspin.errors import ConfigError
from topspin.messages import (
    SAMPLE,
    SCORE,
    MicroBatch,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepTicket,
    pack_ints,
)
from topspin.plan.kv_cache import BlockNeeds
from topspin.plan.spec import NodeConfig
from topspin.units import format_size

_log = logging.getLogger("attention")

GRAPH_BYTES: Final = 16 * 2**20
"""Memory of a recording of about a thousand kernels, without its tensors: an assumption."""

SHORT_SLICE: Final = 64
"""Slices up to this length have separate attention kernels (kernels.triton.attention)."""

_COSTLIEST: Final = SamplingParams(
    max_tokens=2,
    seed=0,
    temperature=1.0,
    top_k=5,
    top_p=0.9,
    presence_penalty=1.0,
    logprobs=20,
    prompt_logprobs=20,
)


class MemoryUse(NamedTuple):
    """Bytes of a device: the total, the use by other processes, and the needs of this process.

    `weights` stay allocated: includes experts of this process, a draft model and its cache, and
    fragmentation. `activations` is the peak of a step beyond that, `graphs` the estimate for
    recordings, `windows` the memory that expert nodes write into.
    """

    total: int
    others: int
    weights: int
    activations: int
    graphs: int
    windows: int = 0


def blocks_that_fit(
    use: MemoryUse,
    *,
    utilization: float,
    block_bytes: int,
    blocks_per_sequence: int,
    code_bytes: Callable[[int], int] | None = None,
) -> int:
    """Return the blocks of `block_bytes` for which `utilization` of the device leaves room.

    With the codes of so many blocks, `code_bytes` of their number.
    Raises ConfigError with all the numbers if they are fewer than MIN_BLOCKS.
    """
    taken = use.others + use.weights + use.activations + use.graphs + use.windows
    left = int(utilization * use.total) - taken
    num_blocks = blocks_within(left, block_bytes, code_bytes)
    if num_blocks < MIN_BLOCKS:
        codes = "" if code_bytes is None else ", and codes for --kv-retrieval-tokens"
        raise ConfigError(
            f"--gpu-memory-utilization {utilization:g}: {describe(use)}; "
            f"{format_size(int(utilization * use.total))} may be used, which leaves {num_blocks} "
            f"blocks of KV cache ({format_size(block_bytes)} each{codes}); at least {MIN_BLOCKS} "
            f"are needed, and {blocks_per_sequence} for one sequence of --max-model-len: raise it, "
            "or lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"
        )
    return num_blocks


def blocks_to_allocate(
    use: MemoryUse,
    *,
    utilization: float,
    block_bytes: int,
    needs: BlockNeeds,
    max_len: int,
    code_bytes: Callable[[int], int] | None = None,
) -> int:
    """Return blocks_that_fit(); logs the uses of memory, and a warning if the blocks are few."""
    num_columns = -(-max_len // needs.block_size)
    per_sequence = needs.of(num_columns)
    num_blocks = blocks_that_fit(
        use,
        utilization=utilization,
        block_bytes=block_bytes,
        blocks_per_sequence=per_sequence,
        code_bytes=code_bytes,
    )
    _log.info("%s; %d blocks of KV cache", describe(use), num_blocks)
    if num_blocks < per_sequence:
        _log.warning(
            "%d blocks of KV cache hold %d tokens, less than one sequence of --max-model-len %d: "
            "longer requests are refused",
            num_blocks,
            needs.columns_within(num_blocks, num_columns) * needs.block_size,
            max_len,
        )
    return num_blocks


@contextmanager
def fitting(runtime: Runtime, what: str) -> Iterator[None]:
    """Raise ConfigError with the numbers, naming `what`, if the device's memory runs out inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        memory = runtime.memory()
        raise ConfigError(
            f"device {runtime.device}: {what} does not fit: {format_size(memory.free)} of "
            f"{format_size(memory.total)} are free and this process has "
            f"{format_size(runtime.reserved_bytes())}: {error}"
        ) from error


def describe(use: MemoryUse) -> str:
    """Return a readable summary of the uses of the device's memory."""
    return (
        f"of {format_size(use.total)}, others take {format_size(use.others)}, weights "
        f"{format_size(use.weights)}, the largest step {format_size(use.activations)}, recorded "
        f"steps {format_size(use.graphs)}, windows of experts {format_size(use.windows)}"
    )


def window_bytes(config: NodeConfig, shape: NetShape) -> int:
    """Return the bytes of an attention node's windows on its device: those of cuda_ipc."""
    if config.link.transport != "cuda_ipc":
        return 0
    return config.num_experts * whole_pages(inbox_bytes(shape, "attention"))


def measure(
    runtime: Runtime, run: Callable[[], None], *, num_graphs: int, windows: int = 0
) -> MemoryUse:
    """Call `run`, which executes the largest steps, and return the uses of memory.

    Recordings keep separate memory for a step's tensors: at most that of the largest step, since
    recorded steps are smaller.
    """
    runtime.synchronize()
    runtime.reset_peak()
    allocated = runtime.peak_bytes()
    run()
    runtime.synchronize()
    activations = runtime.peak_bytes() - allocated
    # The allocator takes memory from the device in pieces, which weights do not fill.
    runtime.release_cached()
    weights = max(allocated, runtime.reserved_bytes())
    memory = runtime.memory()
    return MemoryUse(
        total=memory.total,
        others=memory.total - memory.free - runtime.reserved_bytes(),
        weights=weights,
        activations=activations,
        graphs=activations + num_graphs * GRAPH_BYTES if num_graphs else 0,
        windows=windows,
    )


def largest_steps(
    config: NodeConfig, *, index: int, table_version: int, num_groups: int = 1
) -> list[StepPlan]:
    """Return the plans of a dry run for attention node `index`, with every block id 0.

    Prompts that fill a step, one token of every sequence, and a short slice alone: together they
    reach the peak of memory and use every kernel of steps that are not recorded. Sequences have
    blocks in each of `num_groups` groups of layers.
    """
    max_len, node = config.model.max_model_len, config.attention
    lengths = [min(max_len, node.max_num_batched_tokens)]
    while sum(lengths) < node.max_num_batched_tokens and len(lengths) < node.max_num_seqs:
        lengths.append(min(max_len, node.max_num_batched_tokens - sum(lengths)))
    plan = partial(
        _plan, config=config, index=index, table_version=table_version, num_groups=num_groups
    )
    singles = [1] * node.max_num_seqs
    short = [min(SHORT_SLICE, max_len, node.max_num_batched_tokens)]
    return [plan(1, lengths), plan(2, singles), plan(3, short)]


def _plan(
    generation: int,
    lengths: Sequence[int],
    *,
    config: NodeConfig,
    index: int,
    table_version: int,
    num_groups: int,
) -> StepPlan:
    """Return the first step of a generation: new sequences, all sampled and scored."""
    ids = range(len(lengths))
    block_size = config.kv_cache.block_size
    new = tuple(
        NewSequence(
            seq_id=seq_id,
            tokens=pack_ints([0] * length),
            num_prompt_tokens=length,
            num_computed=0,
            blocks=pack_ints([0] * num_groups * -(-length // block_size)),
            max_length=length + 1,
            sampling=_COSTLIEST,
        )
        for seq_id, length in zip(ids, lengths, strict=True)
    )
    return StepPlan(
        ticket=StepTicket(
            step=1,
            previous=0,
            generation=generation,
            table_version=table_version,
            num_micro_batches=1,
            participants=(index,),
            row_buckets=(sum(lengths),),
        ),
        finished=b"",
        new=new,
        micro_batches=(
            MicroBatch(
                seq_ids=pack_ints(ids),
                num_tokens=pack_ints(lengths),
                wanted=bytes([SAMPLE | SCORE] * len(lengths)),
                block_counts=pack_ints([0] * len(lengths)),
                block_ids=b"",
            ),
        ),
    )
