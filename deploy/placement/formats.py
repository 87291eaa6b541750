"""The precision of a model as the planner handles it: a format for every layer and part.

Owns the table of formats, its classes of equal layers, and its form as a plan's rules. Knows no
times. Called by deploy.placement.search.steps, .precision and .write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from deploy.placement.shapes import ModelShape
from topspin.plan.precision import UNQUANTISED, Format, Part, PrecisionRule

LAYER_PARTS: Final[tuple[Part, ...]] = ("attention", "mlp", "experts")


class LayerFormats(NamedTuple):
    """The formats of one layer; a part that the layer does not have is unquantised."""

    attention: Format = UNQUANTISED
    mlp: Format = UNQUANTISED
    experts: Format = UNQUANTISED


class LayerClass(NamedTuple):
    """Layers with equal times: one of them, and how many."""

    layer: int
    num_layers: int
    formats: LayerFormats


@dataclass(frozen=True, eq=False)
class Formats:
    """All formats of a model. `kl`: the divergence that its sensitivity file gives them."""

    model: ModelShape
    layers: tuple[LayerFormats, ...]
    head: Format = UNQUANTISED
    kl: float = 0.0
    classes: tuple[LayerClass, ...] = field(init=False)
    class_of: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[tuple[object, ...], list[int]] = {}
        for layer, formats in enumerate(self.layers):
            found.setdefault((self.model.layers[layer], formats), []).append(layer)
        classes = tuple(
            LayerClass(layers[0], len(layers), self.layers[layers[0]]) for layers in found.values()
        )
        places = {layer: idx for idx, layers in enumerate(found.values()) for layer in layers}
        object.__setattr__(self, "classes", classes)
        object.__setattr__(self, "class_of", tuple(places[each] for each in sorted(places)))

    @property
    def key(self) -> tuple[object, ...]:
        """Return what identifies it."""
        return (self.layers, self.head)

    def of(self, part: Part, layer: int | None) -> Format:
        """Return a part's format (deploy.placement.shapes.PrecisionOf)."""
        if layer is None or part == "lm_head":
            return self.head
        formats = self.layers[layer]
        if part == "attention":
            return formats.attention
        return formats.experts if part == "experts" else formats.mlp

    @property
    def used(self) -> dict[Part, frozenset[Format]]:
        """Return the formats of each part."""
        return {
            "attention": frozenset(each.attention for each in self.layers),
            "mlp": frozenset(each.mlp for each in self.layers),
            "experts": frozenset(each.experts for each in self.layers),
            "lm_head": frozenset((self.head,)),
        }

    @property
    def is_stored(self) -> bool:
        """Say whether all weights stay as they are."""
        return all(formats == {UNQUANTISED} for formats in self.used.values())

    def rules(self) -> tuple[PrecisionRule, ...]:
        """Return a plan's rules: one per part and format, with its layers if not all have it."""
        rules: list[PrecisionRule] = []
        for part in LAYER_PARTS:
            having = _layers_with(self.model, part)
            for name in sorted(self.used[part] - {UNQUANTISED}):
                layers = tuple(each for each in having if self.of(part, each) == name)
                rules.append(
                    PrecisionRule(
                        format=name, part=part, layers=None if layers == having else layers
                    )
                )
        if self.head != UNQUANTISED:
            rules.append(PrecisionRule(format=self.head, part="lm_head"))
        return tuple(rules)

    def __str__(self) -> str:
        if self.is_stored:
            return "as stored"
        words = []
        for part in LAYER_PARTS:
            layers = _layers_with(self.model, part)
            for each in sorted(self.used[part] - {UNQUANTISED}):
                count = sum(self.of(part, layer) == each for layer in layers)
                share = "" if count == len(layers) else f" in {count} of {len(layers)} layers"
                words.append(f"{part} {each}{share}")
        if self.head != UNQUANTISED:
            words.append(f"LM head {self.head}")
        return ", ".join(words)


def stored(model: ModelShape) -> Formats:
    """Return the formats of weights that stay as they are."""
    return Formats(model, (LayerFormats(),) * model.num_layers)


def _layers_with(model: ModelShape, part: Part) -> tuple[int, ...]:
    return tuple(layer for layer in range(model.num_layers) if model.matrices(part, layer))
