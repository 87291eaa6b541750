"""The sensitivity file: what each format of each layer and part costs in quality.

Owns the reading of what `topspin sensitivity` writes. A plan's divergence is taken as the sum of
its entries. Called by deploy.placement.command, read by deploy.placement.search.precision.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from deploy.placement.shapes import ModelShape
from topspin.errors import ConfigError
from topspin.plan.precision import UNQUANTISED, Format, Part

Key = tuple[Part, int | None, Format]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer's part in a format; `layer` null: the LM head. `kl` in nats per token."""

    layer: Annotated[int, Meta(ge=0)] | None
    part: Part
    format: Format
    indicator: float
    kl: Annotated[float, Meta(ge=0)]


class SensitivityFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured: `positions` tokens of the checkpoint with the fingerprint `model`."""

    model: str
    positions: Annotated[int, Meta(ge=1)]
    entries: tuple[Entry, ...]


class Sensitivity:
    """The divergence that each format of each part adds by itself."""

    def __init__(self, entries: tuple[Entry, ...], model: ModelShape) -> None:
        self._kl: dict[Key, float] = {}
        for idx, entry in enumerate(entries):
            _check(f"entries[{idx}]", entry, model)
            key = (entry.part, entry.layer, entry.format)
            if key in self._kl:
                raise ConfigError(f"entries[{idx}]: {entry} is there twice")
            self._kl[key] = entry.kl

    def kl(self, part: Part, layer: int | None, name: Format) -> float | None:
        """Return the divergence of a part in a format; None: it was not measured."""
        return 0.0 if name == UNQUANTISED else self._kl.get((part, layer, name))


def read_sensitivity(path: Path, model: ModelShape, *, fingerprint: str | None) -> Sensitivity:
    """Return the file at `path`; raises ConfigError for one of another model.

    `fingerprint` of the checkpoint that is planned for; None: its weights are not at hand, and only
    the layers are compared.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=SensitivityFile)
        if fingerprint is not None and found.model != fingerprint:
            raise ConfigError(
                f"measured on another checkpoint (fingerprint {found.model[:12]}..., --model has "
                f"{fingerprint[:12]}...); measure this one with topspin sensitivity"
            )
        return Sensitivity(found.entries, model)
    except OSError as error:
        raise ConfigError(f"--sensitivity {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"--sensitivity {path}: {error}") from error


def _check(where: str, entry: Entry, model: ModelShape) -> None:
    if not math.isfinite(entry.kl):
        raise ConfigError(f"{where}: kl {entry.kl} is no number")
    if (entry.layer is None) != (entry.part == "lm_head"):
        raise ConfigError(f"{where}: part {entry.part} with layer {entry.layer}")
    if entry.layer is not None:
        if entry.layer >= model.num_layers:
            raise ConfigError(
                f"{where}: layer {entry.layer}: the model has layers 0 to {model.num_layers - 1}"
            )
        if not model.matrices(entry.part, entry.layer):
            raise ConfigError(f"{where}: layer {entry.layer} has no part {entry.part}")
