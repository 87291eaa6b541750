"""Checks that a node's experts fit into its device's memory, before anything is read.

Owns the sizes (an expert is packed without data, on the meta device, and measured) and the
numbers in messages. Knows no table; worker.py asks for the share to load, experts.py for experts
that move. The host's memory is not budgeted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import torch

from kernels.contracts import LinearWeight
from kernels.dispatch import Ops
from kernels.runtime import DeviceMemory, Runtime
from m2n_comm.gpu.ipc_pairs import inbox_bytes
from m2n_comm.gpu.memory import whole_pages
from m2n_comm.net import NetShape
from models.description.config import ModelConfig
from topspin.plan.precision import Format
from topspin.plan.spec import NodeConfig
from topspin.units import format_size

# Quantising a matrix needs the matrix and some fp32 copies of it.
_PACKING_COPIES: Final = 6


class ExpertSize(NamedTuple):
    """Bytes of one packed expert, and the additional bytes needed while one is packed."""

    kept: int
    packing: int


def measure_expert(
    ops: Ops, model: ModelConfig, dtype: torch.dtype, weight_format: Format
) -> ExpertSize:
    """Return the size of one expert of `model` packed by `ops`; allocates nothing."""
    assert model.moe is not None
    hidden, width = model.hidden_size, model.moe.intermediate_size
    gate_up = torch.empty(2 * width, hidden, dtype=dtype, device="meta")
    down = torch.empty(hidden, width, dtype=dtype, device="meta")
    packed = ops.pack_experts([gate_up], [down], formats=[weight_format])
    kept = sum(_nbytes(weight) for weight in (*packed.gate_up, *packed.down))
    is_plain = kept == gate_up.nbytes + down.nbytes
    kept += 4 * (2 * width + hidden) if model.moe.has_biases else 0
    copies = 0 if is_plain else gate_up.nbytes + _PACKING_COPIES * gate_up.numel() * 4
    return ExpertSize(kept, copies)


def _nbytes(weight: LinearWeight) -> int:
    scales = getattr(weight, "scales", None)
    return weight.data.nbytes + (0 if scales is None else int(scales.nbytes))


def batch_bytes(config: NodeConfig, shape: NetShape) -> int:
    """Return the bytes of attention nodes' rows on an expert node's device.

    These are the buffer in which they are joined and, over cuda_ipc, the receive windows; 0 if
    all nodes share the device.
    """
    if config.shares_device:
        return 0
    per_row = shape.hidden_size * (shape.compute or shape.payload).itemsize + shape.top_k * 8
    one = shape.window_rows * per_row
    if config.link.transport == "cuda_ipc":
        one += whole_pages(inbox_bytes(shape, "expert"))
    return config.num_attention * one


def shortage(
    sizes: Mapping[ExpertSize, int],
    memory: DeviceMemory,
    device: torch.device,
    *,
    batches: int = 0,
) -> str | None:
    """Return the numbers, for a message, if more experts do not fit; None if they do.

    `sizes` says how many there are of each size; `batches` are the bytes of rows that must fit in
    addition (batch_bytes()).
    """
    kept = sum(size.kept * count for size, count in sizes.items())
    needed = kept + max((size.packing for size in sizes), default=0) + batches
    found = memory.free + memory.cached
    if needed <= found:
        return None
    beside = f" and {format_size(batches)} of rows" if batches else ""
    experts = " and ".join(f"{n} experts of {format_size(size.kept)}" for size, n in sizes.items())
    return (
        f"{experts}{beside} need {format_size(needed)} on "
        f"{device}, of whose {format_size(memory.total)} {format_size(found)} are free"
    )


def lacking(
    runtime: Runtime,
    formats: Iterable[Format],
    *,
    ops: Ops,
    model: ModelConfig,
    dtype: torch.dtype,
    batches: int = 0,
) -> str | None:
    """Return shortage() of more experts in `formats` on the runtime's device; None on the host."""
    if not runtime.is_asynchronous:
        return None
    sizes: Counter[ExpertSize] = Counter()
    for weight_format, count in sorted(Counter(formats).items()):
        sizes[measure_expert(ops, model, dtype, weight_format)] += count
    return shortage(sizes, runtime.memory(), runtime.device, batches=batches)
