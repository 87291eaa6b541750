"""Writes a quantised copy of a checkpoint, layer by layer.

Owns the pass over the calibration text, the shards and their index, the copied files, and that the
directory is complete or absent. Knows no quality. Called by deploy.quantisation.command and by
benchmarks.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from deploy.quantisation.forward import LayerInputs, embedded, layer_output
from deploy.quantisation.grids import Rounding, check_size, rounded
from deploy.quantisation.layers import Matrix, block_name, matrices, open_model
from deploy.quantisation.rounding import quantised
from deploy.quantisation.scheme import module_tensors, quantisation_config
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.expert_sources import ExpertSources
from models.checkpoints.tensor_names import EMBED, LM_HEAD, layer_name
from models.description.config import ModelConfig, load_model_config
from models.quantised.matrices import MatrixReader
from topspin.errors import ConfigError
from topspin.plan.precision import UNQUANTISED, Format, Rules, check_rules, format_of

_SHARD_BYTES: Final = 2 << 30
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def check_source(path: Path) -> ModelConfig:
    """Return the configuration of a model that can be quantised here.

    Raises ConfigError if it is quantised already, or its matrices are not kept as they are stored.
    """
    config = load_model_config(path)
    if config.quantisation is not None:
        raise ConfigError(
            f"{path}: is quantised already ({config.quantisation.method}); give the checkpoint "
            "that it was made from"
        )
    if config.value_dim is not None:
        raise ConfigError(f"{path}: values are narrower than keys, and such models not rewritten")
    return config


def check_request(path: Path, rules: Rules) -> ModelConfig:
    """Return the model's configuration.

    Raises ConfigError as check_source(), or for rules that name what it does not have or quantise
    nothing.
    """
    config = check_source(path)
    check_rules(
        rules,
        num_layers=config.num_layers,
        moe_layers=config.moe_layers,
        num_experts=config.moe.num_experts if config.moe else 0,
        kernels={},
    )
    if all(rule.format == UNQUANTISED for rule in rules):
        raise ConfigError("no part is to be quantised: give a format other than none to one")
    return config


def scale_dtype(config: ModelConfig) -> torch.dtype:
    """Return the dtype in which a model's scales are written: its own."""
    return _DTYPES[config.dtype]


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `path` on a clean exit and is deleted otherwise.

    Raises ConfigError if `path` exists or cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path}: exists already; choose another -o, or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    try:
        yield directory
        # mkdtemp's directory is private.
        directory.chmod(0o755)
        directory.rename(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@torch.inference_mode()
def write_quantised(
    source: Path,
    directory: Path,
    rules: Rules,
    rounding: Rounding,
    *,
    tokens: Tensor,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Write the checkpoint `source`, quantised by `rules`, into `directory`.

    `tokens` i64[S, T] are the calibration text. `advance` is called after each layer. Needs memory
    for a layer in fp32, its Hessians, the embeddings, and the text's hidden states.
    """
    config = check_request(source, rules)
    dtype = scale_dtype(config)
    shards = _Shards(directory)
    formats: dict[str, Format] = {}
    model = open_model(source)
    hidden = embedded(model, tokens)
    for layer in model.layers:
        of_matrices = [(each, _format(rules, each, layer.idx)) for each in matrices(layer, config)]
        for matrix, weight_format in of_matrices:
            formats |= {name: weight_format for name, _ in matrix.modules}
        inputs = None
        if rounding.method == "compensated" and "int4" in {each for _, each in of_matrices}:
            inputs = LayerInputs()
            layer_output(layer, config, hidden, inputs)
        for name, coded in quantised(layer, config, rules, rounding, inputs):
            shards.add(name, module_tensors(coded, symmetric=rounding.symmetric, dtype=dtype))
        hidden = layer_output(layer, config, hidden)
        advance()
    formats[LM_HEAD.removesuffix(".weight")] = format_of(rules, "lm_head")
    if formats["lm_head"] != UNQUANTISED:
        check_size(config.hidden_size, formats["lm_head"], group=rounding.group, name="lm_head")
        head = rounded(model.lm_head, formats["lm_head"], rounding)
        shards.add("lm_head", module_tensors(head, symmetric=rounding.symmetric, dtype=dtype))
    _copy_tensors(source, config, shards, formats)
    shards.finish()
    _copy_files(source, directory)
    _write_config(source, directory, formats, rounding)


def _format(rules: Rules, matrix: Matrix, layer: int) -> Format:
    return format_of(rules, matrix.part, layer, matrix.expert)


class _Shards:
    """Collects tensors, and writes a file whenever they are many."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[list[str]] = []
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._total_bytes = 0

    def add(self, module: str, tensors: dict[str, Tensor]) -> None:
        """Add the tensors of a module."""
        for suffix, tensor in tensors.items():
            self.add_tensor(f"{module}.{suffix}", tensor)

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Add a tensor by its whole name."""
        # A clone: parts of one tensor share its memory, which safetensors refuses.
        self._held[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._held_bytes += tensor.nbytes
        if self._held_bytes >= _SHARD_BYTES:
            self._write()

    def _write(self) -> None:
        self._total_bytes += self._held_bytes
        file = self._directory / f"{len(self._files)}.part"
        save_file(self._held, file, metadata={"format": "pt"})
        self._files.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def finish(self) -> None:
        """Write the rest, and the index if there are several files."""
        if self._held:
            self._write()
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for idx, names in enumerate(self._files):
            name = f"model-{idx + 1:05}-of-{count:05}.safetensors"
            name = "model.safetensors" if count == 1 else name
            (self._directory / f"{idx}.part").rename(self._directory / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True)
            (self._directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _copy_tensors(
    source: Path, config: ModelConfig, shards: _Shards, formats: dict[str, Format]
) -> None:
    """Copy what is not quantised, MoE blocks by their published names, experts one by one."""
    with Checkpoint(source) as checkpoint:
        tied = config.tie_word_embeddings and EMBED not in checkpoint
        for name in sorted(checkpoint.names):
            published = _published(name, config)
            if tied and name == LM_HEAD and formats["lm_head"] != UNQUANTISED:
                published = EMBED
            if ".experts." in published and not published.endswith((".weight", "bias")):
                _copy_stacked(checkpoint, name, published, config, shards, formats)
                continue
            weight_format = formats.setdefault(published.removesuffix(".weight"), UNQUANTISED)
            if weight_format == UNQUANTISED:
                shards.add_tensor(published, checkpoint.read(name))
    # Only modules of the class Linear have to be named, and no vectors.
    vectors = ("norm", "embed_tokens", "bias", "sinks")
    for module in [each for each in formats if each.endswith(vectors)]:
        del formats[module]


def _copy_stacked(
    checkpoint: Checkpoint,
    name: str,
    published: str,
    config: ModelConfig,
    shards: _Shards,
    formats: dict[str, Format],
) -> None:
    """Copy those of a layer's stacked experts that are not quantised."""
    assert config.moe is not None
    names = config.moe.names
    block, _, projection = published.rpartition(".")
    layer = next(idx for idx in config.moe_layers if name.startswith(layer_name(idx, "")))
    reader = MatrixReader(checkpoint, None, dtype=scale_dtype(config))
    places = ExpertSources(reader, config, layer)
    is_first = projection == "gate_up_proj"
    projections = [names.gate, names.up] if is_first else [names.down]
    for expert in range(config.moe.num_experts):
        modules = [f"{block}.{expert}.{own}" for own in projections]
        if formats[modules[0]] == UNQUANTISED:
            sources = places.gate_up(expert) if is_first else places.down(expert)
            _, num_in = places.gate_up_shape if is_first else places.down_shape
            parts = reader.read(sources, num_in).chunk(len(modules))
            for module, part in zip(modules, parts, strict=True):
                shards.add_tensor(f"{module}.weight", part)


def _published(name: str, config: ModelConfig) -> str:
    """Return a tensor's name with the published name of the MoE block."""
    if config.moe is None:
        return name
    for block in config.moe.names.blocks[1:]:
        for inside in ("gate.", "experts.", "shared_expert"):
            name = name.replace(f".{block}.{inside}", f".{block_name(config)}.{inside}")
    return name


def _copy_files(source: Path, directory: Path) -> None:
    """Copy the tokenizer, its template, the generation's defaults, and all else but weights."""
    for file in sorted(source.iterdir()):
        is_ours = file.name in ("config.json", "topspin_manifest.json")
        if file.is_file() and not is_ours and not any(file.match(each) for each in _WEIGHTS):
            shutil.copyfile(file, directory / file.name)


def _write_config(
    source: Path, directory: Path, formats: dict[str, Format], rounding: Rounding
) -> None:
    raw: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if formats["lm_head"] != UNQUANTISED:
        raw["tie_word_embeddings"] = False
    raw["quantization_config"] = quantisation_config(
        formats, group=rounding.group, symmetric=rounding.symmetric
    )
    text = json.dumps(raw, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
