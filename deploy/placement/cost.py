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
    "AttentionLayer",
    "BatchRows",
    "ExpertLayer",
    "StepEnds",
    "barrier_s",
    "chain_s",
    "link_s",
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


class _Roofline(NamedTuple):
    """A device's rates for weights in one format."""

    launch_s: float
    bytes_per_s: float
    flops_per_s: float

    def seconds(self, moved: float, flops: float, *, launches: int = 0) -> float:
        """Return the seconds to move so many bytes or to compute so much, whichever is longer."""
        moved_s, computed_s = moved / self.bytes_per_s, flops / self.flops_per_s
        return launches * self.launch_s + (moved_s if moved_s > computed_s else computed_s)


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

    def roofline(self) -> _Roofline:
        """Return the device's rates for this work."""
        rates = self.device.rates_of(self.threads)
        per_s = rates.flops.get(self.weight_format, rates.flops[UNQUANTISED])
        return _Roofline(rates.launch_s, rates.read_bytes_per_s, per_s)


class AttentionLayer:
    """The seconds of a layer on an attention node: all but the routed experts.

    That is the attention half with its norms and router, and the dense MLP or shared expert. What
    no rows change is looked up once.
    """

    def __init__(
        self,
        device: DeviceProfile,
        model: ModelShape,
        layer: int,
        precision_of: PrecisionOf,
        *,
        threads: int,
    ) -> None:
        self._model, self._layer = model, layer
        half = _Work(device, model, precision_of("attention", layer), threads)
        key = model.attention_key()
        self._decode, self._prefill = half.table("attention", key), half.table("prefill", key)
        self._products, self._keys = (
            each.roofline() for each in (half, half._replace(weight_format=UNQUANTISED))
        )
        self._weights = half.weight_bytes("attention", layer) + model.other_bytes(layer)
        self._numbers = model.numbers("attention", layer)
        self._numbers += model.num_experts * model.hidden_size if model.layers[layer].is_moe else 0
        self._key_bytes, self._score_flops = model.kv_layer_bytes(), 4 * model.q_size
        mlp = _Work(device, model, precision_of("mlp", layer), threads)
        self._has_mlp = bool(model.mlp_width(layer))
        self._mlp = mlp.table("mlp", model.mlp_key(layer))
        self._mlp_roofline, self._mlp_bytes = mlp.roofline(), mlp.weight_bytes("mlp", layer)
        self._mlp_numbers = model.numbers("mlp", layer)

    def seconds(self, rows: BatchRows) -> float:
        """Return the time with such rows."""
        total = rows.decode + rows.prefill
        if not total:
            return 0.0
        decode, prefill = self._decode, self._prefill
        if (rows.decode and decode is None) or (rows.prefill and prefill is None):
            half_s = self._roofline_s(rows, total)
        else:
            half_s = self._table_s(rows)
        if not self._has_mlp:
            return half_s
        if self._mlp is not None:
            return half_s + seconds_at(self._mlp, (total,))
        flops = 2 * total * self._mlp_numbers
        return half_s + self._mlp_roofline.seconds(self._mlp_bytes, flops, launches=_MLP_LAUNCHES)

    def _table_s(self, rows: BatchRows) -> float:
        decode, prefill, total_s = self._decode, self._prefill, 0.0
        if rows.decode:
            assert decode is not None
            seen = self._seen(rows.context)
            total_s += seconds_at(decode, (rows.decode, rows.decode * seen))
        if rows.prefill:
            assert prefill is not None
            total_s += seconds_at(prefill, (rows.prefill, self._seen(rows.start)))
        if rows.decode and rows.prefill:
            # One pass over the weights serves both.
            assert decode is not None
            total_s -= min(decode.seconds[0], 0.5 * total_s)
        return total_s

    def _roofline_s(self, rows: BatchRows, total: float) -> float:
        flops = 2 * total * self._numbers
        products_s = self._products.seconds(self._weights, flops, launches=_ATTENTION_LAUNCHES)
        read = scored = rows.decode * self._seen(rows.context)
        if rows.prefill:
            # A chunk reads its own keys too, whatever the window.
            read += self._seen(rows.start) + rows.prefill
            scored += rows.prefill * self._seen(rows.start + rows.prefill / 2)
        return products_s + self._keys.seconds(read * self._key_bytes, self._score_flops * scored)

    def _seen(self, context: float) -> float:
        return self._model.seen_keys(self._layer, context)


class ExpertLayer:
    """The seconds of a layer's routed experts on a node; what no rows change is looked up once."""

    def __init__(
        self,
        device: DeviceProfile,
        model: ModelShape,
        layer: int,
        weight_format: Format,
        *,
        threads: int,
    ) -> None:
        work = _Work(device, model, weight_format, threads)
        self._table = work.table("experts", model.experts_key())
        self._roofline = work.roofline()
        self._expert_bytes = work.weight_bytes("experts", layer)
        self._row_bytes = 2 * model.hidden_size * model.itemsize
        self._numbers = model.numbers("experts", layer)

    def seconds(self, *, rows: float, pairs: float, touched: float) -> float:
        """Return the time in which `rows` reach the node.

        With `pairs` (row, expert) pairs over `touched` different experts.
        """
        if pairs <= 0.0 or touched <= 0.0:
            return 0.0
        if self._table is not None:
            return seconds_at(self._table, (touched, pairs / touched))
        return self._roofline.seconds(
            touched * self._expert_bytes + rows * self._row_bytes,
            2 * pairs * self._numbers,
            launches=_EXPERT_LAUNCHES,
        )


class StepEnds:
    """The seconds of a step outside its layers.

    These are its plan's indices, embeddings, final norm, LM head and sampling.
    """

    def __init__(
        self, device: DeviceProfile, model: ModelShape, head_format: Format, *, threads: int
    ) -> None:
        work = _Work(device, model, head_format, threads)
        self._table = work.table("head", model.head_key())
        self._roofline, self._weights = work.roofline(), work.weight_bytes("lm_head", None)
        # Logits are fp32: written, and read to sample.
        self._row_bytes = 2 * model.vocab_size * 4
        self._numbers = model.numbers("lm_head")

    def seconds(self, rows: float) -> float:
        """Return the time in which `rows` tokens are sampled."""
        if self._table is not None:
            return seconds_at(self._table, (rows,))
        moved, flops = self._weights + rows * self._row_bytes, 2 * rows * self._numbers
        return self._roofline.seconds(moved, flops, launches=_HEAD_LAUNCHES)


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
                attention_s = (attention_s if attention_s > ready_s else ready_s) + t_a
                ready[micro_batch] = attention_s
                if t_e or t_c:
                    there_s = attention_s + t_c
                    experts_s = (experts_s if experts_s > there_s else there_s) + t_e
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
