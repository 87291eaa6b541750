"""The index of a checkpoint's tensors and their files, read from safetensors headers only.

Owns finding the shards (model.safetensors, or model.safetensors.index.json), parsing and
checking their headers, and noticing that a file has changed since. A GGUF file has its index beside
config.json (models.sources.gguf_checkpoint writes it). Reads no tensor data and knows no model;
imports no torch. models.checkpoints.checkpoint reads tensors with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from topspin.errors import CheckpointError

# The format's limit on a header (safetensors README); a larger one means a damaged file.
_MAX_HEADER_BYTES = 100_000_000
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
GGUF_INDEX: Final = "model.gguf.index.json"
"""The file that says where a GGUF file is, and its tensors in it, by HuggingFace's names."""
COMPUTED: Final = ".rotary_emb.inv_freq"
"""The end of names of tensors that some old checkpoints have and that config.json says."""

_log = logging.getLogger("checkpoint")


class TensorEntry(NamedTuple):
    """The place of one tensor; dtype is safetensors' name for it, e.g. "BF16", or GGUF's ("Q8_0").

    `offset_bytes` counts from the start of the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    offset_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointIndex:
    """All tensors of a checkpoint; every shard exists and is as long as its header says.

    `headers` are digests of config.json and of every shard's header, `states` these files' states
    when they were read. `is_gguf`: the tensors lie in a GGUF file.
    """

    tensors: Mapping[str, TensorEntry]
    headers: Mapping[Path, bytes]
    states: Mapping[Path, FileState]
    is_gguf: bool = False

    def is_untouched(self) -> bool:
        """Say whether no file was replaced or written to since then; False: one may have been."""
        try:
            return all(FileState.of(os.stat(file)) == then for file, then in self.states.items())
        except OSError:
            return False


class FileState(NamedTuple):
    """What a file's replacement and each writing to it change, of the file behind any links."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileState:
        """Return the state in `stat`."""
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class _Shard(NamedTuple):
    header: bytes
    state: FileState
    tensors: dict[str, TensorEntry]


def read_index(path: Path) -> CheckpointIndex:
    """Return the index of the checkpoint directory `path`.

    Raises CheckpointError naming the file or tensor for a missing or truncated shard, a tensor
    stored twice of which the index file assigns none, or one that is in that file but in no shard,
    and for a GGUF file that is not the one that the directory was made of.
    """
    if (path / GGUF_INDEX).exists():
        return _read_gguf(path)
    weight_map = _weight_map(path)
    files = sorted({path / _SINGLE} if weight_map is None else set(weight_map.values()))
    config, state = _config(path)
    headers = {path / "config.json": hashlib.sha256(config).digest()}
    states = {path / "config.json": state}
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        shard = _read_shard(file)
        headers[file] = hashlib.sha256(shard.header).digest()
        states[file] = shard.state
        for name, entry in shard.tensors.items():
            if weight_map is not None and weight_map.get(name, file) != file:
                _log.warning("%s: tensor %s is that of another shard, by %s", file, name, _INDEX)
                continue
            if name in tensors:
                raise CheckpointError(
                    f"{file}: tensor {name} is also stored in {tensors[name].file.name}"
                )
            tensors[name] = entry
    if weight_map is not None:
        _check_weight_map(weight_map, tensors)
    return CheckpointIndex(tensors=tensors, headers=headers, states=states)


def _config(path: Path) -> tuple[bytes, FileState]:
    try:
        with (path / "config.json").open("rb") as stream:
            return stream.read(), FileState.of(os.fstat(stream.fileno()))
    except OSError as error:
        raise CheckpointError(f"{path / 'config.json'}: cannot be read: {error}") from error


def file_or_directory(path: Path) -> str:
    """Return the GGUF file for which the checkpoint directory `path` stands, or else `path`."""
    index = path / GGUF_INDEX
    return str(json.loads(index.read_text("utf-8"))["file"] if index.exists() else path)


def _read_gguf(path: Path) -> CheckpointIndex:
    """Return the index of a directory that stands for a GGUF file."""
    config, state = _config(path)
    index_path = path / GGUF_INDEX
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
        file = Path(index["file"])
        with file.open("rb") as stream:
            header = hashlib.sha256(stream.read(index["header_bytes"]))
            own = FileState.of(os.fstat(stream.fileno()))
        tensors = {
            name: TensorEntry(file, dtype, tuple(shape), size, offset)
            for name, (dtype, shape, offset, size) in index["tensors"].items()
        }
        expected = (index["size_bytes"], index["header_sha256"])
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_path}: is no index of a GGUF file: {error!r}") from error
    if (own.size_bytes, header.hexdigest()) != expected:
        raise CheckpointError(
            f"{file}: is not the file any more of which {path} was made; serve the file anew"
        )
    return CheckpointIndex(
        tensors=tensors,
        headers={path / "config.json": hashlib.sha256(config).digest(), file: header.digest()},
        states={path / "config.json": state, file: own},
        is_gguf=True,
    )


def _weight_map(path: Path) -> dict[str, Path] | None:
    """Return tensor name -> shard of a sharded checkpoint, None for a single file."""
    if (path / _SINGLE).exists():
        return None
    index_path = path / _INDEX
    if not index_path.exists():
        raise CheckpointError(
            f"{path}: has neither {_SINGLE} nor {_INDEX}; Topspin reads safetensors only"
        )
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        named = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_path}: is no safetensors index: {error!r}") from error
    if not named:
        raise CheckpointError(f"{index_path}: weight_map is empty")
    for file in named.values():
        if Path(file).name != file:
            raise CheckpointError(f"{index_path}: shard {file!r} is not a plain file name")
    return {name: path / file for name, file in named.items()}


def _check_weight_map(weight_map: Mapping[str, Path], tensors: Mapping[str, TensorEntry]) -> None:
    for name, file in weight_map.items():
        entry = tensors.get(name)
        if entry is None and not name.endswith(COMPUTED):
            raise CheckpointError(f"{file}: tensor {name}, promised by {_INDEX}, is missing")


def _read_shard(file: Path) -> _Shard:
    try:
        with file.open("rb") as stream:
            state = FileState.of(os.fstat(stream.fileno()))
            prefix = stream.read(8)
            header_size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= header_size <= min(_MAX_HEADER_BYTES, state.size_bytes - 8):
                raise CheckpointError(f"{file}: is truncated, or no safetensors file")
            header = stream.read(header_size)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: shard is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    try:
        parsed = json.loads(header)
        parsed.pop("__metadata__", None)
        start = 8 + header_size
        tensors = {name: _entry(file, value, start=start) for name, value in parsed.items()}
        ends = [int(value["data_offsets"][1]) for value in parsed.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{file}: its header is damaged: {error!r}") from error
    expected = 8 + header_size + max(ends, default=0)
    if state.size_bytes != expected:
        raise CheckpointError(
            f"{file}: is {state.size_bytes} bytes long, its header says {expected}; "
            "download it again"
        )
    return _Shard(header=header, state=state, tensors=tensors)


def _entry(file: Path, value: Mapping[str, object], *, start: int) -> TensorEntry:
    shape = value["shape"]
    offsets = value["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError(f"shape {shape!r} or offsets {offsets!r} is no list")
    return TensorEntry(
        file=file,
        dtype=str(value["dtype"]),
        shape=tuple(int(size) for size in shape),
        size_bytes=int(offsets[1]) - int(offsets[0]),
        offset_bytes=start + int(offsets[0]),
    )
