"""A GGUF file as a checkpoint directory: HuggingFace's files, made of its metadata.

Owns the directory in Topspin's cache that stands in for the file: config.json, the tokenizer's
files, generation_config.json, and the index by which models.checkpoints reads the tensors where
they are. No weight is copied. All else reads a directory, and knows of no GGUF. Called by
models.sources.hub.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from models.checkpoints.checkpoint_index import GGUF_INDEX
from models.sources.gguf_file import GgufFile
from models.sources.gguf_names import model_config, named_tensors
from models.sources.gguf_tokenizer import ending_ids, read_tokenizer, read_tokenizer_config
from models.sources.made_model import MadeModel
from topspin.errors import ConfigError

# Part of the manifest: a directory that an older version of this module made is made again.
_RECIPE: Final = 2


def gguf_checkpoint(path: Path, root: Path) -> Path:
    """Return the directory below `root` that stands for the GGUF file `path`, made if necessary.

    Its last part is the file's name without ".gguf"; a file that has been written to since gets
    its directory anew. Raises ConfigError naming what of the file cannot be read, or not served.
    """
    path = path.resolve()
    try:
        state = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    place = hashlib.sha256(bytes(path)).hexdigest()[:16]
    recipe = f"{_RECIPE}:{state.st_size}:{state.st_mtime_ns}"
    made = MadeModel(root / place / path.stem, recipe=recipe)
    with made.locked():
        if not made.is_complete(verify=False):
            file = GgufFile(path)
            with made.writing() as directory:
                _write(file, directory, size_bytes=state.st_size)
    return made.path


def _write(file: GgufFile, directory: Path, *, size_bytes: int) -> None:
    tokens: dict[str, Any] = {"eos_token_id": ending_ids(file)}
    first = file.get("tokenizer.ggml.bos_token_id")
    if first is not None:
        tokens["bos_token_id"] = first
    with file.path.open("rb") as stream:
        header = hashlib.sha256(stream.read(file.header_bytes)).hexdigest()
    index = {
        "file": str(file.path),
        "size_bytes": size_bytes,
        "header_bytes": file.header_bytes,
        "header_sha256": header,
        "tensors": named_tensors(file),
    }
    _write_json(directory / "config.json", {**model_config(file), **tokens})
    _write_json(directory / "generation_config.json", tokens)
    _write_json(directory / "tokenizer_config.json", read_tokenizer_config(file))
    _write_json(directory / GGUF_INDEX, index)
    read_tokenizer(file).save(str(directory / "tokenizer.json"))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
