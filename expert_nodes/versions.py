"""A node's experts by version of the expert table, and how often each slot was used.

Owns the versions that a node holds, their shared weights, and the counts of each. Two versions
share the memory of the experts that both hold. Counts are on the experts' device and only grow:
the computing thread adds (`Ops.add_counts`) and never waits; the reporting thread reads them and
subtracts the counts reported before, so that captured graphs can keep adding. Knows no transport
and no file. Called by experts.py; in one process with the attention node, the attention thread
computes while another prepares and takes counts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.contracts import PackedExperts
from topspin.errors import ProtocolError
from topspin.messages import pack_ints

Held = tuple[tuple[int, ...], ...]
"""By MoE layer, the logical experts of this node in slot order."""


class SlotCounts(NamedTuple):
    """Pairs served by version `version`: packed, per layer, one count per slot.

    `activations` and `batches` as in ExpertCounts.
    """

    version: int
    counts: tuple[bytes, ...]
    activations: int
    batches: int


@dataclass(slots=True)
class TableVersion:
    """The experts of one table version: layers[i] holds the experts held[i] (None: there are none).

    `counts` [E + 2] by layer, which `Ops.add_counts` adds to, are views of `used`; `reported`, on
    the host, are the counts reported so far.
    """

    number: int
    held: Held
    layers: list[PackedExperts | None]
    used: Tensor
    counts: tuple[Tensor, ...]
    reported: Tensor


def make_version(
    number: int,
    held: Sequence[Sequence[int]],
    layers: list[PackedExperts | None],
    device: torch.device | str = "cpu",
) -> TableVersion:
    """Return a version with counts of 0; `device` is that of its experts."""
    sizes = [len(experts) + 2 for experts in held]
    used = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    return TableVersion(
        number,
        tuple(tuple(experts) for experts in held),
        layers,
        used,
        torch.split(used, sizes),
        torch.zeros(sum(sizes), dtype=torch.int64),
    )


class Versions:
    """Invariant: a version is dropped when a newer one is first used (tickets are in order)."""

    def __init__(self, first: TableVersion) -> None:
        self._versions = {first.number: first}
        # Dropped versions whose counts are not reported yet.
        self._left: list[TableVersion] = []
        self._lock = threading.Lock()

    @property
    def has_counts(self) -> bool:
        """Return whether take_counts() may have something to return; always true on a GPU."""
        return any(
            not each.used.is_cpu or not torch.equal(each.used, each.reported)
            for each in (*self._left, *self._versions.values())
        )

    @property
    def newest(self) -> TableVersion:
        """Return the version with the highest number."""
        versions = self._versions
        return versions[max(versions)]

    @property
    def numbers(self) -> list[int]:
        """Return the versions that are held, ascending."""
        return sorted(self._versions)

    def use(self, number: int) -> TableVersion:
        """Return a version to compute with. Raises ProtocolError if it was never prepared."""
        version = self._versions.get(number)
        if version is None:
            raise ProtocolError(f"expert table {number}: this node has {self.numbers}")
        if len(self._versions) > 1 and min(self._versions) < number:
            with self._lock:
                kept = {known: each for known, each in self._versions.items() if known >= number}
                self._retire([each for known, each in self._versions.items() if known < number])
                self._versions = kept
        return version

    def add(self, version: TableVersion) -> None:
        """Add a version; one of the same number is replaced."""
        with self._lock:
            self._versions = {**self._versions, version.number: version}

    def drop_from(self, number: int) -> None:
        """Forget version `number` and newer ones, which no step will name."""
        with self._lock:
            kept = {known: each for known, each in self._versions.items() if known < number}
            self._versions = kept or self._versions

    def holds(self, held: Held) -> bool:
        """Say whether a version has these experts."""
        return any(each.held == held for each in self._versions.values())

    def rename(self, number: int, held: Held) -> None:
        """Keep only the version with the experts `held`, under `number`.

        Raises ProtocolError if there is none.
        """
        if self.numbers == [number] and self.newest.held == held:
            return
        with self._lock:
            found = [each for each in self._versions.values() if each.held == held]
            if not found:
                raise ProtocolError(
                    f"expert table {number} gives this node other experts than it has loaded"
                )
            self._retire(list(self._versions.values()))
            last = found[-1]
            again = make_version(number, held, last.layers, last.used.device)
            self._versions = {number: again}

    def take_counts(self) -> list[SlotCounts]:
        """Return the pairs served since the last call, oldest version first.

        Waits for the device's queue.
        """
        with self._lock:
            taken, self._left = self._left, []
            taken += [self._versions[number] for number in self.numbers]
        return [found for version in taken if (found := _report(version)) is not None]

    def _retire(self, versions: list[TableVersion]) -> None:
        """Drop the weights of `versions`; keep their counts."""
        self._left += [replace(version, layers=[]) for version in versions]


def _report(version: TableVersion) -> SlotCounts | None:
    """Return the counts since the last report, None if there are none."""
    used = version.used.to("cpu", copy=True)
    new = used - version.reported
    version.reported = used
    if not new.any():
        return None
    layers = [part.tolist() for part in torch.split(new, [len(held) + 2 for held in version.held])]
    return SlotCounts(
        version.number,
        tuple(pack_ints(layer[:-2]) for layer in layers),
        activations=sum(layer[-2] for layer in layers),
        batches=sum(layer[-1] for layer in layers),
    )
