"""The number of launches of a layer in a decode step: small batches feel each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from kernels.contracts import AttentionMeta, HeadRows, RoutingRule
from kernels.dispatch import select_ops
from kernels.triton.router.launches import local_slots
from topspin.plan.precision import UNQUANTISED, Format

HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS, FFN, BLOCK = 32, 4, 2, 16, 4, 16, 4

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="counts what the interpreter is called for"
)


class _TorchCalls(TorchDispatchMode):
    """Records the operations that compute or copy; views and allocations are no launches."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func._schema.name.startswith(
            ("aten::empty", "aten::new_empty")
        ):
            self._names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield a list that receives the names of kernels and of torch's operations, in order."""
    names: list[str] = []
    run = GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    with monkeypatch.context() as patched, _TorchCalls(names):
        patched.setattr(GridExecutor, "__call__", noted)
        yield names


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) / shape[-1] ** 0.5


def decode_layer(
    max_context_len: int,
    monkeypatch: pytest.MonkeyPatch,
    formats: Sequence[Format] = (UNQUANTISED,) * EXPERTS,
) -> list[str]:
    """Run one layer on two sequences, one node holding all experts; return its launches.

    The projections have the first of the experts' `formats`.
    """
    rows = 2
    ops = select_ops("triton", torch.float32, set(formats) - {UNQUANTISED})
    qkv_weight = ops.pack_linear(weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), formats[0])
    o_weight = ops.pack_linear(weight(HIDDEN, HEADS * DIM), formats[0])
    router = ops.pack_linear(weight(EXPERTS, HIDDEN))
    experts = ops.pack_experts(
        weight(EXPERTS, 2 * FFN, HIDDEN), weight(EXPERTS, HIDDEN, FFN), formats=formats
    )
    norm, head_norm = torch.ones(HIDDEN), torch.ones(DIM)
    caches = torch.zeros(2, 4, BLOCK, KV_HEADS, DIM).unbind()
    slot_of = torch.arange(EXPERTS, dtype=torch.int32)[None]
    residual, delta = torch.randn(2, rows, HIDDEN).unbind()
    tables = torch.ones(2, rows, DIM // 2).unbind()
    kv_slots, num_rows = torch.tensor([1, 6]), torch.tensor([rows])
    meta = AttentionMeta(
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        context_lens=torch.tensor([2, 3], dtype=torch.int32),
        block_tables=torch.tensor([[0], [1]], dtype=torch.int32),
        max_query_len=1,
        max_context_len=max_context_len,
    )
    with launches(monkeypatch) as names:
        normed = ops.add_rms_norm(delta, residual, norm, eps=1e-6)
        qkv = ops.linear(normed, qkv_weight)
        q = qkv[:, : HEADS * DIM].view(rows, HEADS, DIM)
        k, v = (part.view(rows, KV_HEADS, DIM) for part in qkv[:, HEADS * DIM :].chunk(2, dim=1))
        ops.rotate_and_store(
            HeadRows(q, k, v, *tables, *caches, kv_slots, head_norm, head_norm, eps=1e-6)
        )
        attended = ops.paged_attention(q, *caches, meta, scale=0.25)
        normed = ops.add_rms_norm(
            ops.linear(attended.flatten(1), o_weight), residual, norm, eps=1e-6
        )
        routing = ops.route(ops.linear(normed, router), RoutingRule(2, renormalise=True))
        slots = local_slots(routing.experts, slot_of, num_rows)
        ops.grouped_mlp(normed, slots[0], routing.weights, experts)
    return names


BEFORE_ATTENTION = ["_norm_row", "mm", "_rotate_and_store", "attend_short"]
AFTER_ATTENTION = ["mm", "_norm_row", "mm", "route_block"]
ROUTED = ["local_slots_block", "gate_up_tile", "down_tile", "sum_choices"]


def test_a_layers_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    short = decode_layer(100, monkeypatch)
    assert short == [*BEFORE_ATTENTION, *AFTER_ATTENTION, *ROUTED]


@pytest.mark.slow
def test_long_contexts_are_split_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    long = decode_layer(4096, monkeypatch)
    assert long == [*BEFORE_ATTENTION, "combine_splits", *AFTER_ATTENTION, *ROUTED]


@pytest.mark.slow
def test_quantised_weights_take_as_many_where_a_product_is_one_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantised = decode_layer(100, monkeypatch, ["int8"] * EXPERTS)
    plain = decode_layer(100, monkeypatch)
    assert len(quantised) == len(plain)
    assert quantised.count("linear_tile") == 2
