"""`topspin models`: the model families that are served, and the facts of one model.

Owns the two tables. Reads config.json and the index of a checkpoint, no weight; knows no device.
Loaded by app.cli.main.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, get_args, get_origin, get_type_hints

from rich import box
from rich.console import Console
from rich.table import Table

from deploy.placement.memory import attention_weight_bytes, expert_weight_bytes
from deploy.placement.shapes import ModelShape, precision_by
from models.checkpoints.checkpoint_index import GGUF_INDEX
from models.description.config import ModelConfig, load_model_config
from models.description.facts import facts_of
from models.description.parts import LatentConfig, LayerConfig, MoeConfig, RouterConfig
from models.description.rope_config import RopeConfig
from models.families import FAMILIES
from models.families.family import FamilyParts
from models.quantised.config import METHODS
from models.sources.hub import resolve_model
from topspin.errors import ConfigError
from topspin.expert_activation import ExpertActivation
from topspin.plan.precision import KERNEL_FORMATS, Rules, rules_of
from topspin.units import format_size

PARTS: Final[dict[str, type]] = {
    "models": FamilyParts,
    "layers": LayerConfig,
    "latents": LatentConfig,
    "ropes": RopeConfig,
    "routers": RouterConfig,
    "experts": MoeConfig,
    "activations": ExpertActivation,
}
_STRUCTURE: Final = ("layers", "latent", "moe", "router", "activation", "names")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="of a checkpoint, or a GGUF file; none: all families",
    )
    parser.add_argument(
        "--expert-nodes", type=int, default=1, metavar="N", help="that share the experts (1)"
    )
    parser.add_argument(
        "--quantization", default="none", choices=("none", "int8", "int4"), help="of weights (none)"
    )


def run(parsed: argparse.Namespace) -> int:
    """Print the table that is asked for; returns the exit status.

    Raises ConfigError naming the field of config.json that is not served.
    """
    table = Table(box=box.SIMPLE, show_header=False)
    rows = _families() if parsed.directory is None else _facts(parsed)
    for name, value in rows:
        table.add_row(name, value)
    Console(file=sys.stdout, highlight=False).print(table)
    return 0


def _families() -> Iterator[tuple[str, str]]:
    for name, family in sorted(FAMILIES.items()):
        head = inspect.getdoc(inspect.getmodule(family.parts)) or ""
        yield name, head.partition("\n")[0]
    for title, part in PARTS.items():
        yield title, ", ".join(_options(part))
    yield "checkpoints", f"bfloat16, float16, float32; {', '.join(METHODS)}"
    for kernels, formats in KERNEL_FORMATS.items():
        yield f"weights on {kernels}", f"as they are, {', '.join(formats)}"


def _options(part: type) -> Iterator[str]:
    """Yield what a part may have, with the words that it chooses from."""
    for name, hint in get_type_hints(part).items():
        words = get_args(hint) if get_origin(hint) is Literal else ()
        if name not in _STRUCTURE:
            yield f"{name} ({', '.join(map(str, words))})" if words else name


def _facts(parsed: argparse.Namespace) -> Iterator[tuple[str, str]]:
    directory = parsed.directory
    if directory.exists():  # another name is no hub id here
        directory = resolve_model(str(directory))
    config = load_model_config(directory)
    has_weights = any(directory.glob("*.safetensors")) or (directory / GGUF_INDEX).exists()
    facts = facts_of(config, directory if has_weights else None)
    shape = ModelShape.from_config(config, dtype=config.dtype)
    rules = rules_of(parsed.quantization) or facts.precision.get("cpu", ())
    precision = precision_by(rules)
    attention = attention_weight_bytes(shape, precision, kernels="cpu")
    yield "family", f"{config.family}: {FAMILIES[config.family].architecture}"
    yield "layers", _layers(config)
    if config.moe is not None:
        moe, router = config.moe, config.moe.router
        shared = " and a shared one" if moe.shared_intermediate_size else ""
        yield "experts", f"{moe.num_experts}, {moe.top_k} for a token{shared}; {router.scores}"
    yield "context", f"{facts.max_positions} tokens"
    yield "stored as", config.quantisation.method if config.quantisation else config.dtype
    yield "weights", _served(rules) if parsed.quantization == "none" else parsed.quantization
    yield "attention node", format_size(attention)
    if config.moe is not None:
        nodes = parsed.expert_nodes
        if not 1 <= nodes <= config.moe.num_experts:
            raise ConfigError(f"--expert-nodes {nodes}: 1 to {config.moe.num_experts} are possible")
        held = -(-config.moe.num_experts // nodes)
        experts = expert_weight_bytes(shape, precision, held=held, kernels="cpu")
        yield "expert node", f"{format_size(experts)}, {held} experts of each layer"
    yield "keys and values", f"{_keys(shape)}, {config.dtype}"


def _served(rules: Rules) -> str:
    """Return the formats in which a CPU serves what a checkpoint has stored, by part."""
    named = dict.fromkeys(f"{rule.part or 'all'} in {rule.format}" for rule in rules)
    return ", ".join(named) or "as stored"


def _keys(shape: ModelShape) -> str:
    """Return what a token's keys take, and a sequence's in layers with windows, however long."""
    windows = [each.sliding_window for each in shape.layers]
    per_token = windows.count(None) * shape.kv_layer_bytes()
    kept = sum(each for each in windows if each is not None) * shape.kv_layer_bytes()
    return f"{per_token} bytes a token" + (f", {format_size(kept)} a sequence" if kept else "")


def _layers(config: ModelConfig) -> str:
    windows = sum(layer.sliding_window is not None for layer in config.layers)
    windowed = f", {windows} with a window" if windows else ""
    return f"{config.num_layers}, {len(config.moe_layers)} with experts{windowed}"
