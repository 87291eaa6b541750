"""Chooses the formats of a checkpoint for a size: those of the least divergence.

Owns the bits of a written format, and the translation to the planner's choice of formats. Imports
no torch. Called by deploy.quantisation.command and by benchmarks.
"""

from __future__ import annotations

from typing import Final

from deploy.placement.formats import LAYER_PARTS, Formats, LayerFormats
from deploy.placement.search.bits import Item, Option, least
from deploy.placement.sensitivity import Sensitivity
from deploy.placement.shapes import ModelShape
from topspin.errors import ConfigError
from topspin.plan.precision import UNQUANTISED, Format, Part, Rules, format_of

CHOICES: Final[tuple[Format, ...]] = (UNQUANTISED, "int8", "int4")
"""What kernels of all devices compute with."""
_SCALE_BITS: Final = 16
_ZERO_BITS: Final = 4


def stored_bits(weight_format: Format, *, group: int, symmetric: bool) -> float:
    """Return the bits of a number in a written checkpoint of 16-bit dtype, scales included."""
    if weight_format == UNQUANTISED:
        return 16.0
    if weight_format == "fp8":
        return 8.0
    if weight_format == "int8":
        return 8 + _SCALE_BITS / group
    return 4 + (_SCALE_BITS + (0 if symmetric else _ZERO_BITS)) / group


def mean_bits(rules: Rules, shape: ModelShape, *, group: int, symmetric: bool) -> float:
    """Return the mean of stored_bits over the numbers of all layers that formats are for.

    The LM head's do not count.
    """
    bits = total = 0.0
    for layer in range(shape.num_layers):
        for part in LAYER_PARTS:
            numbers = _numbers(shape, part, layer)
            expert = 0 if part == "experts" else None
            name = format_of(rules, part, layer, expert)
            bits += numbers * stored_bits(name, group=group, symmetric=symmetric)
            total += numbers
    return bits / total


def mixed(
    shape: ModelShape, sensitivity: Sensitivity, bits: float, *, group: int, symmetric: bool
) -> Formats:
    """Return formats of the least predicted divergence with at most `bits` mean_bits.

    The LM head keeps its own. Raises ConfigError if no formats that were measured are so small.
    """
    items, total = [], 0
    for layer in range(shape.num_layers):
        for part in LAYER_PARTS:
            numbers = _numbers(shape, part, layer)
            options = []
            for name in CHOICES:
                kl = sensitivity.kl(part, layer, name)
                if kl is not None:
                    size = numbers * stored_bits(name, group=group, symmetric=symmetric) / 8
                    options.append(Option(name, size, kl))
            if numbers:
                items.append(Item(layer, part, tuple(options)))
                total += numbers
    choice = least(items, lambda option: option.kl, num_bytes=total * bits / 8)
    if choice is None:
        smallest = sum(min(each.num_bytes for each in item.options) for item in items) * 8 / total
        raise ConfigError(
            f"--mean-bits {bits:g}: {smallest:.3f} are the least, with scales, in formats that the "
            "sensitivity file has"
        )
    layers = [dict[str, Format]() for _ in range(shape.num_layers)]
    kl = 0.0
    for item, idx in zip(items, choice, strict=True):
        assert item.layer is not None
        layers[item.layer][item.part] = item.options[idx].format
        kl += item.options[idx].kl
    return Formats(shape, tuple(LayerFormats(**each) for each in layers), kl=kl)


def _numbers(shape: ModelShape, part: Part, layer: int) -> int:
    """Return the numbers of a layer's part, of all experts, that may be quantised."""
    own = sum(matrix.numbers for matrix in shape.matrices(part, layer))
    return own * (shape.num_experts if part == "experts" else 1)
