"""A node's experts by version of the expert table, and how often each slot was used.

Owns which versions a node holds, what is shared between them, and the counts of each. The
weights of experts that two versions have in common are the same memory. Knows no transport
and no file. Called by experts.py; in one process with the attention node, that one's thread
computes while another prepares and takes counts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.contracts import ExpertWeights
from topspin.errors import ProtocolError
from topspin.messages import pack_ints

Held = tuple[tuple[int, ...], ...]
"""By MoE layer, the logical experts of this node in slot order."""


class SlotCounts(NamedTuple):
    """Pairs served by version `version`: packed, per layer, one count per slot."""

    version: int
    counts: tuple[bytes, ...]


@dataclass(slots=True)
class Version:
    """The experts of one table version: layers[i] holds the experts held[i]."""

    number: int
    held: Held
    layers: list[ExpertWeights]
    counts: list[Tensor]


def make_version(
    number: int, held: Sequence[Sequence[int]], layers: list[ExpertWeights]
) -> Version:
    """Return a version that nobody has used yet."""
    counts = [torch.zeros(layer.num_experts, dtype=torch.int64) for layer in layers]
    return Version(number, tuple(tuple(experts) for experts in held), layers, counts)


class Versions:
    """Invariant: a version is dropped when a newer one is first used (tickets are in order)."""

    def __init__(self, first: Version) -> None:
        self._versions = {first.number: first}
        # Of versions that are gone, not yet taken.
        self._left: list[Version] = []
        self._lock = threading.Lock()
        self.has_counts = False

    @property
    def newest(self) -> Version:
        """Return the version with the highest number."""
        versions = self._versions
        return versions[max(versions)]

    @property
    def numbers(self) -> list[int]:
        """Return the versions that are held, ascending."""
        return sorted(self._versions)

    def use(self, number: int) -> Version:
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

    def add(self, version: Version) -> None:
        """Hold one more version; one of the same number is replaced."""
        with self._lock:
            self._versions = {**self._versions, version.number: version}

    def rename(self, number: int, held: Held) -> None:
        """Keep only the version with the experts `held`, under `number`: a table begins anew.

        Raises ProtocolError if there is none.
        """
        with self._lock:
            found = [each for each in self._versions.values() if each.held == held]
            if not found:
                raise ProtocolError(
                    f"expert table {number} gives this node other experts than it has loaded"
                )
            self._retire(list(self._versions.values()))
            self._versions = {number: make_version(number, held, found[-1].layers)}

    def count(self, version: Version, layer: int, counts: Tensor) -> None:
        """Add the pairs [E] that a batch has brought."""
        with self._lock:
            version.counts[layer] += counts
            self.has_counts = True

    def take_counts(self) -> list[SlotCounts]:
        """Return the pairs served since the last call, oldest version first."""
        with self._lock:
            taken, self._left = self._left, []
            for number in self.numbers:
                version = self._versions[number]
                if self.has_counts and _is_used(version):
                    taken.append(Version(number, version.held, version.layers, version.counts))
                    version.counts = [torch.zeros_like(layer) for layer in version.counts]
            self.has_counts = False
        return [
            SlotCounts(each.number, tuple(pack_ints(layer.tolist()) for layer in each.counts))
            for each in taken
        ]

    def _retire(self, versions: list[Version]) -> None:
        """Keep the counts of versions that are dropped; their weights go."""
        for version in versions:
            if _is_used(version):
                self._left.append(Version(version.number, version.held, [], version.counts))
                self.has_counts = True


def _is_used(version: Version) -> bool:
    return any(bool(layer.any()) for layer in version.counts)
