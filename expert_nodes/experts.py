"""The routed experts that one node holds.

Owns their packed weights per table version, MoE layer and slot, reads and packs the experts of
a new version, and counts how often each slot is used. Knows no transport: it turns an
ExpertBatch, whose tensors are on the weights' device, into the rows' weighted partial sums. On
a GPU this only enqueues work, so a graph can hold it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from expert_nodes.memory import lacking
from expert_nodes.versions import Held, SlotCounts, Versions, make_version
from kernels import deterministic
from kernels.contracts import ExpertMatrices, ExpertOutput
from kernels.contracts import ExpertWeights as PackedExperts
from kernels.cpu.compiled.slowdown import Slowdown
from kernels.dispatch import Ops
from kernels.runtime import HostRuntime, Runtime
from m2n_comm.net import ExpertBatch, NetShape
from models.config import ModelConfig
from models.expert_reader import ExpertReader
from models.weights import ExpertStream, ExpertWeights, take
from topspin.plan import NodeConfig
from topspin.precision import UNQUANTISED, Format, Rules, format_of
from topspin.trace import Ring


class Experts:
    """All MoE layers' experts of this node."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ExpertWeights | Iterator[ExpertStream],
        ops: Ops,
        *,
        held: Sequence[Sequence[int]],
        version: int = 1,
        per_expert_answers: bool = False,
        runtime: Runtime | None = None,
        counts: bool = True,
        precision: Rules = (),
    ) -> None:
        """Pack `weights`, layer by layer; each original is dropped as soon as it is packed.

        `held` lists, per MoE layer, the logical experts of `weights` in slot order: this node's
        share in table `version`. `per_expert_answers` is NetShape's; `ops` are then the
        deterministic ones. `runtime` is of the device where `weights` are (None: the host).
        `counts` False: the uses of slots are not counted. `precision` gives experts their formats.
        """
        assert config.moe is not None
        self._config = config
        self.runtime: Runtime = runtime or HostRuntime()
        self._counts = counts
        self._top_k = config.moe.top_k
        self._ops = ops
        assert not per_expert_answers or ops.name == deterministic.name
        self._per_expert_answers = per_expert_answers
        self.trace: Ring | None = None
        self.slowdown: Slowdown | None = None
        self._precision = precision
        layers: list[PackedExperts] = []
        for read in take(weights.layers) if isinstance(weights, ExpertWeights) else weights:
            layer = len(layers)
            packed = ops.pack_experts(
                read.gate_up,
                read.down,
                formats=self._formats(layer, held[layer]),
                share_per_row=self._share_per_row(layer),
            )
            layers.append(packed)
        self._versions = Versions(make_version(version, held, layers, self.runtime.device))

    def _formats(self, layer: int, experts: Iterable[int]) -> list[Format]:
        """Return the formats of logical `experts` of a MoE layer."""
        idx = self._config.moe_layers[layer]
        return [format_of(self._precision, "experts", idx, expert) for expert in experts]

    def _share_per_row(self, layer: int) -> float:
        """Return the argument of pack_experts; 0 if the layer's experts differ in format.

        The same on every node, so that copies of an expert have one layout.
        """
        assert self._config.moe is not None
        num_experts = self._config.moe.num_experts
        is_mixed = len(set(self._formats(layer, range(num_experts)))) > 1
        return 0.0 if is_mixed else self._config.moe.top_k / num_experts

    @property
    def num_layers(self) -> int:
        """Return the number of MoE layers."""
        return len(self._versions.newest.layers)

    @property
    def has_counts(self) -> bool:
        """Return whether take_counts() may have something to return."""
        return self._counts and self._versions.has_counts

    def net_shape(self, config: NodeConfig) -> NetShape:
        """Return the shape of the net between this node and each attention node."""
        return NetShape.from_config(
            config,
            hidden_size=self._config.hidden_size,
            top_k=self._top_k,
            num_layers=self.num_layers,
        )

    def compute(self, batch: ExpertBatch) -> Tensor:
        """Return the weighted partial sums [R, H] of `batch`, or its pairs' rows [P, H].

        Never waits for the device: the result is ready for work that is enqueued after it.
        """
        version = self._versions.use(batch.table_version)
        layer = version.layers[batch.layer]
        if self.slowdown is not None:
            self.slowdown.begin()
        result = self._run(batch.hidden, batch.slots, batch.weights, layer)
        if self._counts:
            self._ops.add_counts(version.counts[batch.layer], result.counts)
        if self.slowdown is not None:
            self.slowdown.end()
        return result.out

    def warm_up(self, num_rows: Sequence[int] = (1,)) -> None:
        """Run every layer on `num_rows` rows, so that the first request finds code and memory.

        With several numbers the first layer of each shape (by its experts' formats) runs all of
        them, the other layers only the last: a device's kernels differ by the number of rows.
        """
        version = self._versions.newest
        seen: set[tuple[Format, ...]] = set()
        for layer, experts in enumerate(version.layers):
            shape = tuple(sorted(self._formats(layer, version.held[layer])))
            is_new = shape not in seen
            seen.add(shape)
            for rows in num_rows if is_new else num_rows[-1:]:
                self._warm_up_layer(experts, rows)
        self.runtime.synchronize()

    def _warm_up_layer(self, experts: PackedExperts, rows: int) -> None:
        device, top_k = self.runtime.device, self._top_k
        hidden = torch.zeros(rows, experts.hidden_size, dtype=experts.dtype, device=device)
        pairs = torch.arange(rows * top_k, dtype=torch.int32, device=device)
        slots = (pairs % experts.num_experts).view(rows, top_k)
        found = self._run(hidden, slots, torch.zeros(rows, top_k, device=device), experts)
        unread = torch.zeros(experts.num_experts + 2, dtype=torch.int64, device=device)
        self._ops.add_counts(unread, found.counts)

    def _run(
        self, hidden: Tensor, slots: Tensor, weights: Tensor, experts: PackedExperts
    ) -> ExpertOutput:
        if self._per_expert_answers:
            return deterministic.pair_mlp(hidden, slots, experts)
        return self._ops.grouped_mlp(hidden, slots, weights, experts)

    def take_counts(self) -> list[SlotCounts]:
        """Return (per table version, layer and slot) the pairs served since the last call."""
        return self._versions.take_counts()

    # Changes of the table.

    def prepare(
        self, version: int, held: Held, reader: ExpertReader
    ) -> Generator[None, None, None]:
        """Make table `version` usable, in which this node holds `held`; the one in use stays.

        Yields after each piece of about half a millisecond (small experts that are packed
        together: after each pass over one of a layer's matrices). Unchanged slots share memory
        with the previous version.
        """
        base = self._versions.newest
        for layer, (old, new) in enumerate(zip(base.held, held, strict=True)):
            for expert in new:
                if expert not in old:
                    reader.read_ahead(layer, expert)
                    yield
        layers: list[PackedExperts] = []
        for layer, (old, new) in enumerate(zip(base.held, held, strict=True)):
            if old == new:
                layers.append(base.layers[layer])
                continue
            sources: list[int | ExpertMatrices] = []
            for expert in new:
                if expert in old:
                    sources.append(old.index(expert))
                else:
                    (own,) = self._formats(layer, [expert])
                    tensors = yield from reader.read(layer, expert, keep_codes=own != UNQUANTISED)
                    sources.append(ExpertMatrices(*tensors, own))
            packed = yield from self._ops.rebuild_experts(base.layers[layer], sources)
            layers.append(packed)
        # Another thread's streams may read the experts as soon as a step names the table.
        self.runtime.current_stream().record().wait()
        self._versions.add(make_version(version, held, layers, self.runtime.device))
        reader.close()

    def drop_from(self, version: int) -> None:
        """Forget the experts prepared for `version`: another node has refused that table."""
        self._versions.drop_from(version)

    def lacking(self, held: Held) -> str | None:
        """Return, with numbers, the memory lacking to prepare `held`; None if it suffices."""
        base = self._versions.newest
        moved = [
            weight_format
            for layer, (old, new) in enumerate(zip(base.held, held, strict=True))
            for weight_format in self._formats(layer, set(new) - set(old))
        ]
        dtype = base.layers[0].dtype
        return lacking(self.runtime, moved, ops=self._ops, model=self._config, dtype=dtype)

    def rename(self, version: int, held: Held) -> None:
        """Assign a new version to the loaded experts `held`, and drop all others.

        Raises ProtocolError if others were loaded.
        """
        self._versions.rename(version, held)

    @property
    def versions(self) -> list[int]:
        """Return the table versions that can be computed with, ascending."""
        return self._versions.numbers
