"""The routed experts that one node holds.

Owns their packed weights per table version, MoE layer and slot, reads and packs the experts of
a new version, and counts how often each slot is used. Knows no transport: it turns an
ExpertBatch, whose tensors are on the weights' device, into the rows' weighted partial sums. On
a GPU this only enqueues work, so a graph can hold it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from expert_nodes.memory import lacking
from expert_nodes.versions import Held, SlotCounts, Versions, make_version
from kernels import deterministic
from kernels.contracts import ExpertMatrices, PackedExperts
from kernels.dispatch import Ops
from kernels.experts import layers as expert_layers
from kernels.experts.layers import LayerExperts
from kernels.runtime import HostRuntime, Runtime
from m2n_comm.net import ExpertBatch, NetShape, Senders
from models.checkpoints.expert_reader import ExpertReader
from models.checkpoints.weights import ExpertLayerWeights, ExpertStream
from models.description.config import ModelConfig
from topspin.plan.precision import UNQUANTISED, Format, Rules
from topspin.plan.spec import NodeConfig
from topspin.plan.stages import senders
from topspin.trace import Ring

if TYPE_CHECKING:  # a host with a GPU may lack what it is compiled with
    from kernels.cpu.compiled.slowdown import Slowdown


class Experts:
    """All MoE layers' experts of this node."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[ExpertStream | ExpertLayerWeights],
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
        num_experts, top_k = config.moe.num_experts, config.moe.top_k
        self._layers = [
            LayerExperts(idx, num_experts, top_k, precision, config.moe.activation)
            for idx in config.moe_layers
        ]
        layers: list[PackedExperts | None] = []
        for read in weights:
            layer = len(layers)
            mine = held[layer]
            pack = self._layers[layer].pack
            biases = read.biases
            layers.append(pack(ops, read.gate_up, read.down, mine, biases=biases) if mine else None)
        self._dtype = next((each.dtype for each in layers if each is not None), torch.float32)
        self._versions = Versions(make_version(version, held, layers, self.runtime.device))

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

    def senders(self, config: NodeConfig) -> Senders:
        """Return who sends attention nodes' rows of each MoE layer; (): they do themselves."""
        if not config.stages:
            return ()
        return senders(
            config.stages,
            num_attention=config.num_attention - len(config.stages),
            layers=self._config.moe_layers,
        )

    def compute(self, batch: ExpertBatch) -> Tensor:
        """Return the weighted partial sums [R, H] of `batch`, or its pairs' rows [P, H].

        Never waits for the device: the result is ready for work that is enqueued after it.
        """
        version = self._versions.use(batch.table_version)
        layer = version.layers[batch.layer]
        assert layer is not None, "no row comes for a layer without experts here"
        with self.slowdown or nullcontext():
            result = expert_layers.compute(
                self._ops,
                batch.hidden,
                batch.slots,
                batch.weights,
                layer,
                per_expert=self._per_expert_answers,
            )
            if self._counts:
                self._ops.add_counts(version.counts[batch.layer], result.counts)
        return result.out

    def warm_up(self, num_rows: Sequence[int] = (1,)) -> None:
        """Run every layer on `num_rows` rows, so that the first request finds code and memory.

        With several numbers the first layer of each shape (by its experts' formats) runs all of
        them, the other layers only the last: a device's kernels differ by the number of rows.
        """
        version = self._versions.newest
        seen: set[tuple[Format, ...]] = set()
        for layer, held, experts in zip(self._layers, version.held, version.layers, strict=True):
            if experts is None:
                continue
            shape = tuple(sorted(layer.formats(held)))
            is_new = shape not in seen
            seen.add(shape)
            for rows in num_rows if is_new else num_rows[-1:]:
                expert_layers.warm_up(
                    self._ops,
                    experts,
                    rows,
                    top_k=self._top_k,
                    device=self.runtime.device,
                    per_expert=self._per_expert_answers,
                )
        self.runtime.synchronize()

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
        layers: list[PackedExperts | None] = []
        for layer, (old, new) in enumerate(zip(base.held, held, strict=True)):
            before = base.layers[layer]
            if old == new or before is None:
                assert old == new, "a node that holds nothing of a layer never will"
                layers.append(before)
                continue
            sources: list[int | ExpertMatrices] = []
            for expert in new:
                if expert in old:
                    sources.append(old.index(expert))
                else:
                    (own,) = self._layers[layer].formats([expert])
                    tensors = yield from reader.read(layer, expert, keep_codes=own != UNQUANTISED)
                    gate_up, down, biases = tensors
                    sources.append(ExpertMatrices(gate_up, down, own, biases))
            packed = yield from self._ops.rebuild_experts(before, sources)
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
            for weight_format in self._layers[layer].formats(set(new) - set(old))
        ]
        return lacking(self.runtime, moved, ops=self._ops, model=self._config, dtype=self._dtype)

    def keep_newest(self) -> None:
        """Drop all versions but the newest: no step will name them."""
        self._versions.use(self._versions.newest.number)

    def holds(self, held: Held) -> bool:
        """Say whether a version that is held has these experts."""
        return self._versions.holds(held)

    def rename(self, version: int, held: Held) -> None:
        """Assign a new version to the loaded experts `held`, and drop all others.

        Raises ProtocolError if others were loaded.
        """
        self._versions.rename(version, held)

    @property
    def versions(self) -> list[int]:
        """Return the table versions that can be computed with, ascending."""
        return self._versions.numbers
