"""Resolves a model's name to a checkpoint directory on this machine.

Owns the meaning of a model's name (a directory, a GGUF file, the default model, or a HuggingFace
hub id) and the place of the models that Topspin makes. Knows no checkpoint's contents; the CLI and
every node call resolve_model. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from topspin.errors import ConfigError

DEFAULT_MODEL = "smollm2-moe"

# Safetensors and their configuration: never a pickle, nor a second copy of the weights.
_ALLOWED = [
    *("*.safetensors", "*.json", "*.jinja"),
    *("tokenizer*", "merges.txt", "vocab.txt", "tiktoken.model"),
]
_IGNORED = ["*.bin", "*.pt", "*.pth", "consolidated*", "original/*", "onnx/*"]


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """Return Topspin's cache: $TOPSPIN_CACHE, $XDG_CACHE_HOME/topspin or ~/.cache/topspin."""
    environ = os.environ if environ is None else environ
    if environ.get("TOPSPIN_CACHE"):
        return Path(environ["TOPSPIN_CACHE"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).expanduser() / "topspin"
    return Path.home() / ".cache" / "topspin"


def made_model_path(name: str, root: Path | None = None) -> Path:
    """Return the path of a model that Topspin makes; it may not exist yet."""
    return (cache_root() if root is None else root) / "models" / name


def resolve_model(model: str) -> Path:
    """Return the checkpoint directory of `model`, downloading a hub id if necessary.

    A directory or a GGUF file takes precedence; the latter's is made (models.sources.
    gguf_checkpoint). Raises ConfigError naming `model` if it is not found: not pulled, not on the
    hub, or not reachable.
    """
    directory = Path(model).expanduser()
    if model and directory.is_file():
        return _of_gguf(directory)
    if model and directory.is_dir():
        try:
            found = _gguf_in(directory)
            if found is not None:
                return _of_gguf(found)
            is_checkpoint = (directory / "config.json").exists()
        except OSError as error:  # of a directory that this user may not search
            raise ConfigError(f"{model}/config.json: {error.strerror}") from error
        if not is_checkpoint:
            raise ConfigError(f"{model}: is a directory without config.json, no checkpoint")
        return directory.resolve()
    if model == DEFAULT_MODEL:
        made = made_model_path(DEFAULT_MODEL)
        if not (made / "config.json").exists():
            raise ConfigError(f"{model}: is not in {made}; run `topspin pull {model}`")
        return made
    is_file = model.startswith((".", "~")) or model.endswith(".gguf")
    if not model or directory.is_absolute() or is_file:
        raise ConfigError(f"{model!r}: no such directory, nor GGUF file")
    if model.count("/") != 1:
        raise ConfigError(
            f"{model!r}: is neither a directory, nor {DEFAULT_MODEL}, nor a hub id such as "
            "organisation/name"
        )
    return _download(model)


def _gguf_in(directory: Path) -> Path | None:
    """Return the GGUF file that is all there is of weights in `directory`.

    Raises ConfigError if there are several.
    """
    found = sorted(directory.glob("*.gguf"))
    if not found or any(directory.glob("*.safetensors")):
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"{directory}: has several GGUF files; name one of {names}")
    return found[0]


def _of_gguf(file: Path) -> Path:
    # The library takes a while to import, which few models need.
    from models.sources.gguf_checkpoint import gguf_checkpoint
    from models.sources.made_model import Unwritable

    try:
        return gguf_checkpoint(file, made_model_path("gguf"))
    except Unwritable:
        # Containers can only read the models, and have a home to write to.
        own = made_model_path("gguf", Path.home() / ".cache" / "topspin")
        return gguf_checkpoint(file, own)


def _download(repo_id: str) -> Path:
    """Return the snapshot of a hub repository; cached files are not downloaded again."""
    try:
        path = huggingface_hub.snapshot_download(
            repo_id, allow_patterns=_ALLOWED, ignore_patterns=_IGNORED
        )
    except HFValidationError as error:
        raise ConfigError(f"{repo_id}: is not a hub id: {error}") from error
    except GatedRepoError as error:
        raise ConfigError(
            f"{repo_id}: needs its licence accepted on the hub and a token (HF_TOKEN)"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{repo_id}: no such directory, and no such model on the hub (or it is private "
            "and HF_TOKEN is not set)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{repo_id}: is not in the local hub cache, and the hub cannot be reached; download "
            "it where there is a network, or give a directory"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{repo_id}: cannot be downloaded: {error}") from error
    snapshot = Path(path)
    if not (snapshot / "config.json").exists():
        raise ConfigError(f"{repo_id}: its snapshot {snapshot} has no config.json, no checkpoint")
    return snapshot
