"""The seconds and bytes of a step, from a device's profile and a model's shape.

Owns the times of one layer and one micro-batch on one node, the hop between nodes, and the step
that they add up to: measured tables where the shape was measured, the roofline (Williams,
Waterman, Patterson, CACM 2009) where it was not. Pure arithmetic; knows no search. Called by the
planner and by benchmarks.engine.cost_model.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Final, NamedTuple

from deploy.placement.devices import DeviceProfile, LinkProfile, Operation, Table
from deploy.placement.shapes import Kernels, ModelShape, PrecisionOf
from deploy.placement.tables import find_table, seconds_at
from topspin.pipeline import HopTimes, layers_s
from topspin.plan.precision import UNQUANTISED, Format, Part

__all__ = [
    "BatchRows",
    "attention_layer_s",
    "barrier_s",
    "chain_s",
    "experts_layer_s",
    "link_s",
    "step_fixed_s",
    "step_s",
    "unmeasured",
]

# Kernels that a recorded layer launches, for devices without tables.
_ATTENTION_LAUNCHES: Final = 8
_MLP_LAUNCHES: Final = 3
_EXPERT_LAUNCHES: Final = 3
_HEAD_LAUNCHES: Final = 6


class BatchRows(NamedTuple):
    """The rows of one micro-batch on one node, of one or both phases.

    `decode` sequences advance by a token, which attends to `context` keys on average; `prefill`
    tokens of a prompt's chunk begin at position `start`.
    """

    decode: float = 0.0
    context: float = 0.0
    prefill: float = 0.0
    start: float = 0.0

    @property
    def total(self) -> float:
        """Return the token rows."""
        return self.decode + self.prefill


class _Work(NamedTuple):
    """A kind of work on so many threads of a device, with weights in one format."""

    device: DeviceProfile
    model: ModelShape
    weight_format: Format
    threads: int

    def table(self, operation: Operation, shape: tuple[int, ...]) -> Table | None:
        """Return the measured table, if there is one."""
        return find_table(self.device, operation, shape, self.weight_format, self.threads)

    def weight_bytes(self, part: Part, layer: int | None) -> int:
        """Return the packed bytes of a part; of the experts, one's."""
        kernels: Kernels = "cpu" if self.device.kind == "cpu" else "triton"
        return self.model.weight_bytes(part, layer, self.weight_format, kernels=kernels)

    def roofline_s(self, *, moved: float, flops: float, launches: int = 0) -> float:
        """Return the seconds to move so many bytes or to compute so much, whichever is longer."""
        rates = self.device.rates_of(self.threads)
        per_s = rates.flops.get(self.weight_format, rates.flops[UNQUANTISED])
        return launches * rates.launch_s + max(moved / rates.read_bytes_per_s, flops / per_s)


def attention_layer_s(
    device: DeviceProfile,
    model: ModelShape,
    layer: int,
    precision_of: PrecisionOf,
    rows: BatchRows,
    *,
    threads: int,
) -> float:
    """Return the seconds of a layer on an attention node: all but the routed experts.

    That is the attention half with its norms and router, and the dense MLP or shared expert.
    """
    if not rows.total:
        return 0.0
    half = _Work(device, model, precision_of("attention", layer), threads)
    mlp = _Work(device, model, precision_of("mlp", layer), threads)
    return _half_s(half, layer, rows) + _mlp_s(mlp, layer, rows.total)


def _half_s(work: _Work, layer: int, rows: BatchRows) -> float:
    model, key = work.model, work.model.attention_key()
    decode, prefill = work.table("attention", key), work.table("prefill", key)
    if (rows.decode and decode is None) or (rows.prefill and prefill is None):
        return _roofline_half_s(work, layer, rows)
    total_s = 0.0
    if rows.decode:
        assert decode is not None
        seen = model.seen_keys(layer, rows.context)
        total_s += seconds_at(decode, (rows.decode, rows.decode * seen))
    if rows.prefill:
        assert prefill is not None
        total_s += seconds_at(prefill, (rows.prefill, model.seen_keys(layer, rows.start)))
    if rows.decode and rows.prefill:
        # One pass over the weights serves both.
        assert decode is not None
        total_s -= min(decode.seconds[0], 0.5 * total_s)
    return total_s


def _roofline_half_s(work: _Work, layer: int, rows: BatchRows) -> float:
    model = work.model
    numbers = model.numbers("attention", layer)
    numbers += model.num_experts * model.hidden_size if model.layers[layer].is_moe else 0
    products_s = work.roofline_s(
        moved=work.weight_bytes("attention", layer) + model.other_bytes(layer),
        flops=2 * rows.total * numbers,
        launches=_ATTENTION_LAUNCHES,
    )
    seen = rows.decode * model.seen_keys(layer, rows.context)
    # A chunk reads its own keys too, whatever the window.
    read = seen + (model.seen_keys(layer, rows.start) + rows.prefill if rows.prefill else 0.0)
    scored = seen + rows.prefill * model.seen_keys(layer, rows.start + rows.prefill / 2)
    keys = work._replace(weight_format=UNQUANTISED)
    return products_s + keys.roofline_s(
        moved=read * model.kv_layer_bytes(), flops=4 * scored * model.q_size
    )


def _mlp_s(work: _Work, layer: int, rows: float) -> float:
    model = work.model
    if not model.mlp_width(layer):
        return 0.0
    table = work.table("mlp", model.mlp_key(layer))
    if table is not None:
        return seconds_at(table, (rows,))
    flops = 2 * rows * model.numbers("mlp", layer)
    return work.roofline_s(
        moved=work.weight_bytes("mlp", layer), flops=flops, launches=_MLP_LAUNCHES
    )


def experts_layer_s(
    device: DeviceProfile,
    model: ModelShape,
    layer: int,
    weight_format: Format,
    *,
    rows: float,
    pairs: float,
    touched: float,
    threads: int,
) -> float:
    """Return the seconds of a layer's routed experts on one node.

    `rows` reach the node, with `pairs` (row, expert) pairs over `touched` different experts.
    """
    if pairs <= 0.0 or touched <= 0.0:
        return 0.0
    work = _Work(device, model, weight_format, threads)
    table = work.table("experts", model.experts_key())
    if table is not None:
        return seconds_at(table, (touched, pairs / touched))
    weights = touched * work.weight_bytes("experts", layer)
    return work.roofline_s(
        moved=weights + 2 * rows * model.hidden_size * model.itemsize,
        flops=2 * pairs * model.numbers("experts", layer),
        launches=_EXPERT_LAUNCHES,
    )


def step_fixed_s(
    device: DeviceProfile, model: ModelShape, head_format: Format, rows: float, *, threads: int
) -> float:
    """Return the seconds of a step outside its layers, where `rows` tokens are sampled.

    These are its plan's indices, embeddings, final norm, LM head and sampling.
    """
    work = _Work(device, model, head_format, threads)
    table = work.table("head", model.head_key())
    if table is not None:
        return seconds_at(table, (rows,))
    return work.roofline_s(
        # Logits are fp32: written, and read to sample.
        moved=work.weight_bytes("lm_head", None) + 2 * rows * model.vocab_size * 4,
        flops=2 * rows * model.numbers("lm_head"),
        launches=_HEAD_LAUNCHES,
    )


def link_s(link: LinkProfile, num_bytes: float) -> float:
    """Return the seconds in which a message of `num_bytes` arrives, one way."""
    return link.alpha_s + num_bytes / link.bytes_per_s


def step_s(
    hops: Sequence[HopTimes],
    *,
    fixed_s: float,
    micro_batches: int,
    shares_cores: bool,
    factor: float = 1.0,
) -> float:
    """Return the seconds of a step: its layers in the pipeline, and what is outside them.

    `factor`: by how much a rally takes longer than that (RallyFactors.step).
    """
    rallied_s = layers_s(hops, num_micro_batches=micro_batches, shares_cores=shares_cores)
    return factor * (fixed_s + rallied_s)


def barrier_s(moments: Sequence[tuple[float, float]]) -> float:
    """Return the expected maximum of independent normal times (mean, standard deviation).

    E[max] is the integral of 1 - F_1(x) ... F_n(x) from 0, plus that of -F_1 ... F_n below it.
    """
    highest = max(mean for mean, _ in moments)
    if len(moments) == 1 or all(deviation == 0.0 for _, deviation in moments):
        return highest
    widest = max(deviation for _, deviation in moments)
    low, high = highest - 8 * widest, highest + 8 * widest
    count = 256
    width = (high - low) / count
    total_s = low
    for idx in range(count):
        at = low + (idx + 0.5) * width
        below = 1.0
        for mean, deviation in moments:
            below *= NormalDist(mean, deviation).cdf(at) if deviation else float(at >= mean)
        total_s += (1.0 - below) * width
    return total_s


def chain_s(
    layers: Sequence[HopTimes], ends: Sequence[int], *, num_micro_batches: int, pass_s: float
) -> float:
    """Return how long a step's layers take where they are cut over several devices at `ends`.

    topspin.pipeline.layers_s() with a device of its own for each range. Micro-batches leave a range
    in their order, once it has sent out its last layer's last rows, and go to the next by way of
    the first device: `pass_s` each time.

    One step is under way at a time, and its micro-batches are served layer by layer, so stages do
    not overlap as LLM-PQ's do: of its objective, (n - 1) max(sum_j t_j, N_dec max_j t_j) for n
    tokens (corrected; arXiv 2403.01136 has (n - 1) N_dec max_j t_j), it is the case N_dec = 1, in
    both phases.
    """
    experts_s, begin = 0.0, 0
    ready = [0.0] * num_micro_batches
    for idx, end in enumerate(ends):
        attention_s = 0.0
        if idx:
            ready = [each + (pass_s if idx == 1 else 2 * pass_s) for each in ready]
        for t_a, t_e, t_c, _ in layers[begin:end]:
            for micro_batch, ready_s in enumerate(ready):
                attention_s = max(attention_s, ready_s) + t_a
                ready[micro_batch] = attention_s
                if t_e or t_c:
                    experts_s = max(experts_s, attention_s + t_c) + t_e
                    ready[micro_batch] = experts_s + t_c
        ready = [max(each, attention_s) for each in ready]
        begin = end
    return max(ready) + (pass_s if len(ends) > 1 else 0.0)


def unmeasured(
    device: DeviceProfile, model: ModelShape, precision_of: PrecisionOf, *, role: str, threads: int
) -> list[str]:
    """Return what the roofline answers for, as no table was measured: for reports."""
    asked: set[tuple[Operation, tuple[int, ...], Format]] = set()
    for layer, kind in enumerate(model.layers):
        if role == "expert":
            if kind.is_moe:
                asked.add(("experts", model.experts_key(), precision_of("experts", layer)))
            continue
        of_attention = precision_of("attention", layer)
        asked.add(("attention", model.attention_key(), of_attention))
        asked.add(("prefill", model.attention_key(), of_attention))
        if model.mlp_width(layer):
            asked.add(("mlp", model.mlp_key(layer), precision_of("mlp", layer)))
    if role == "attention":
        asked.add(("head", model.head_key(), precision_of("lm_head", None)))
    found = []
    for operation, shape, weight_format in sorted(asked):
        table = find_table(device, operation, shape, weight_format, threads)
        if table is None:
            found.append(f"{operation} in {weight_format}")
        elif table.threads != threads:
            found.append(f"{operation} in {weight_format} with {threads} threads")
    return found
