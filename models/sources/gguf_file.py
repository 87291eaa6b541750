"""One GGUF file, open for reading its header: metadata and the places of tensors.

Owns the checks that make a file readable (whole, little-endian, in one part, with tensors of known
types) and dequantising for those who make models of it. Knows no architecture and no tokenizer.
Called by the modules models.sources.gguf_*. Format: the GGUF specification, through the `gguf`
library, which is needed where a file is read for the first time only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from models.description.config_fields import ConfigFields
from topspin.errors import ConfigError

Float32Array = npt.NDArray[np.float32]

_DAMAGE: Final = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError)
"""What the library raises for files that are cut off, or are something else."""


class GgufTensor(NamedTuple):
    """A tensor's type by GGUF's name ("Q8_0"), its shape, outputs first, and its place in bytes."""

    type: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


class GgufFile:
    """An open file; its data stays mapped while it lives.

    `header_bytes` are those before the first tensor's data.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises ConfigError if it is no whole GGUF file, or one part of several."""
        self.path = path
        try:
            with np.errstate(over="ignore"):  # of sums of a damaged file's sizes
                self._reader: Any = gguf.GGUFReader(path)
        except (OSError, *_DAMAGE) as error:
            raise ConfigError(
                f"{path}: is not a GGUF file, or is truncated: {type(error).__name__}: {error}"
            ) from error
        self.header_bytes = int(self._reader.data_offset)
        self.tensors: Mapping[str, GgufTensor] = {
            each.name: GgufTensor(
                type=each.tensor_type.name,
                shape=tuple(int(size) for size in reversed(each.shape)),
                offset_bytes=int(each.data_offset),
                size_bytes=int(each.n_bytes),
            )
            for each in self._reader.tensors
        }
        self.architecture = str(self.field("general.architecture"))
        if self._reader.endianess != gguf.GGUFEndian.LITTLE:
            raise ConfigError(f"{path}: is big-endian; supported: little-endian")
        if self.get("split.count", 1) > 1:
            raise ConfigError(f"{path}: is one of several parts (split.count); merge them first")

    def __contains__(self, name: str) -> bool:
        """Return whether the metadata has field `name`."""
        return name in self._reader.fields

    @property
    def names(self) -> list[str]:
        """Names of all fields of the metadata."""
        return list(self._reader.fields)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value, `default` if there is none; a float32 as its shortest decimal.

        The decimal is the number that was meant: 1e-05, not 9.99999974e-06.
        """
        found = self._reader.fields.get(name)
        if found is None:
            return default
        try:
            value = found.contents()
        except _DAMAGE as error:
            raise ConfigError(f"{self.path}: {name} cannot be read: {error}") from error
        if found.types[-1:] == [gguf.GGUFValueType.FLOAT32] and isinstance(value, float):
            return float(str(np.float32(value)))
        return value

    def field(self, name: str) -> Any:
        """Return a field's value as get() does; raises ConfigError if there is none."""
        if name not in self:
            raise ConfigError(f"{self.path}: its metadata has no {name}")
        return self.get(name)

    def fields(self, prefix: str) -> ConfigFields:
        """Return the fields whose names begin with `prefix`, by the rest of their names."""
        named = {name.removeprefix(prefix): name for name in self.names if name.startswith(prefix)}
        return ConfigFields(
            {rest: self.get(name) for rest, name in named.items()},
            source=f"{self.path}: {prefix.removesuffix('.')}",
        )

    def tensor(self, name: str) -> GgufTensor:
        """Return the place of tensor `name`; raises ConfigError if there is none."""
        found = self.tensors.get(name)
        if found is None:
            raise ConfigError(f"{self.path}: has no tensor {name}")
        return found

    def read(self, name: str) -> Float32Array:
        """Return a copy of tensor `name`, dequantised; raises ConfigError if there is none."""
        shape = self.tensor(name).shape
        found = next(each for each in self._reader.tensors if each.name == name)
        values = gguf.quants.dequantize(found.data, found.tensor_type)
        # A copy: unquantised data would be a view of the read-only mapping.
        copied = np.array(values, dtype=np.float32)
        assert copied.size == math.prod(shape)
        return copied.reshape(shape)
