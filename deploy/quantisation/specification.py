"""Reads `--bits`: formats by part and layer, short enough to type.

Owns the grammar. Imports no torch. Called by deploy.quantisation.command.
"""

from __future__ import annotations

import re
from typing import Final, get_args

from topspin.errors import ConfigError
from topspin.plan.precision import Format, Part, PrecisionRule, Rules

_FORMATS: Final[dict[str, Format]] = {
    "4": "int4",
    "int4": "int4",
    "8": "int8",
    "int8": "int8",
    "fp8": "fp8",
    "16": "none",
    "none": "none",
}
_PARTS: Final[tuple[Part, ...]] = get_args(Part)
_ITEM: Final = re.compile(r"(?:(?P<part>\w+)(?:\[(?P<layers>[\d,\-\s]+)\])?=)?(?P<format>\w+)\Z")
_COMMA_OUTSIDE: Final = re.compile(r",(?![^\[]*\])")
BITS_HELP: Final = (
    "formats by part, the last that covers a matrix wins: 4, or experts=4,attention=8,mlp=fp8, "
    "with layers experts[0-3,9]=8; 4, 8, fp8 or none for attention, mlp, experts or lm_head"
)


def parse_bits(text: str) -> Rules:
    """Return the rules of a specification such as "4,attention=8,experts[0-3,9]=8".

    A format without a part is that of all layers; the LM head keeps its own unless it is named.
    Raises ConfigError naming what cannot be read.
    """
    rules: list[PrecisionRule] = []
    head = PrecisionRule(format="none", part="lm_head")
    for item in _COMMA_OUTSIDE.split(text):
        found = _ITEM.match(item.strip())
        if found is None:
            raise ConfigError(f"--bits {text}: {item.strip()!r} is no PART[LAYERS]=FORMAT")
        name, wanted = found["format"], found["part"]
        if name not in _FORMATS:
            raise ConfigError(f"--bits {text}: {name!r} is no format; choose {', '.join(_FORMATS)}")
        if wanted is None:
            rules.append(PrecisionRule(format=_FORMATS[name]))
            continue
        parts: list[Part] = [part for part in _PARTS if part == wanted]
        if not parts:
            raise ConfigError(f"--bits {text}: {wanted!r} is no part; choose {', '.join(_PARTS)}")
        layers = None if found["layers"] is None else _layers(found["layers"], text)
        rule = PrecisionRule(format=_FORMATS[name], part=parts[0], layers=layers)
        if rule.part == "lm_head":
            head = rule
        else:
            rules.append(rule)
    rules.append(head)
    return tuple(rules)


def _layers(text: str, whole: str) -> tuple[int, ...]:
    """Return the layers of "0-3,9", ascending."""
    layers: set[int] = set()
    for piece in text.split(","):
        first, dash, last = (each.strip() for each in piece.partition("-"))
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"--bits {whole}: layers are numbers and ranges such as [0-3,9]")
        low, high = int(first), int(last if dash else first)
        if low > high:
            raise ConfigError(f"--bits {whole}: {piece.strip()} is an empty range of layers")
        layers.update(range(low, high + 1))
    return tuple(sorted(layers))
