"""Comparison of an implementation's ops with the reference, on the cases of `ops`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernels import reference
from kernels.dispatch import Ops
from kernels.runtime import NoSync
from tests.kernels.cases.ops import Maker, Op

HOST = torch.device("cpu")


def compare_all(op: Op, ops: Ops, device: torch.device, rows: Sequence[tuple[Any, ...]]) -> None:
    """Compare each row of values, with one, two or three threads in turn."""
    for idx, values in enumerate(rows):
        torch.set_num_threads(1 + idx % 3)
        case = SimpleNamespace(**dict(zip(op.factors, values, strict=True)))
        try:
            compare(op, ops, device, case)
        except Exception as error:
            error.add_note(f"with {case}")
            raise


def compare(op: Op, ops: Ops, device: torch.device, case: SimpleNamespace) -> None:
    """Compare all that an op computes or changes; a GPU's ops as in a CUDA graph."""
    dtype = case.kind[0] if hasattr(case, "kind") else case.dtype
    if ops.name == "triton" and getattr(case, "out_dtype", None) == torch.bfloat16:
        dtype = torch.bfloat16  # experts' parts are kept in the dtype of the result
    rtol, atol = op.tolerance[dtype]
    if device.type == "cuda":  # where the sum of two products is fused
        rtol, atol = max(rtol, 1e-5), max(atol, 1e-5)
    wanted = op.prepare(reference, Maker(HOST), case)()
    run = op.prepare(ops, Maker(device), case)
    with NoSync() if ops.name == "triton" else nullcontext():
        found = run()
    for ours, theirs in zip(found, wanted, strict=True):
        check(ours.cpu(), theirs, rtol=rtol, atol=atol)


def check(ours: Tensor, theirs: Tensor, *, rtol: float, atol: float) -> None:
    assert ours.dtype == theirs.dtype
    if theirs.dtype.is_floating_point:
        if theirs.itemsize == 1:  # torch compares no fp8 with a tolerance
            ours, theirs = ours.float(), theirs.float()
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)
    else:
        assert torch.equal(ours, theirs)
