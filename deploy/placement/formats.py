"""The precision of a model as the planner handles it: a format for every layer and part.

Owns the table of formats, its classes of equal layers, and its form as a plan's rules. Knows no
times. Called by deploy.placement.search.steps, .precision and .write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from deploy.placement.shapes import ModelShape, precision_by
from topspin.plan.precision import UNQUANTISED, Format, Part, PrecisionRule, Rules

Layers = tuple[int, ...]
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
        return self.layers[layer][LAYER_PARTS.index(part)]

    def rules(self) -> tuple[PrecisionRule, ...]:
        """Return a plan's rules: one per part and format, with its layers if not all have it."""
        return tuple(
            PrecisionRule(format=name, part=part, layers=None if layers == having else layers)
            for part, name, layers, having in self._choices()
        )

    def _choices(self) -> Iterator[tuple[Part, Format, Layers, Layers]]:
        """Yield a part, its format, the layers with it, and all that have the part.

        Without weights that stay as they are.
        """
        for part in LAYER_PARTS:
            having = tuple(
                each for each in range(len(self.layers)) if self.model.matrices(part, each)
            )
            for name in sorted({self.of(part, each) for each in having} - {UNQUANTISED}):
                yield part, name, tuple(e for e in having if self.of(part, e) == name), having
        if self.head != UNQUANTISED:
            yield "lm_head", self.head, (), ()

    def __str__(self) -> str:
        words = []
        for part, name, layers, having in self._choices():
            share = "" if layers == having else f" in {len(layers)} of {len(having)} layers"
            words.append(f"{'LM head' if part == 'lm_head' else part} {name}{share}")
        return ", ".join(words) or "as stored"


def stored(model: ModelShape, rules: Rules = ()) -> Formats:
    """Return the formats of weights that stay as they are, by the `rules` of a checkpoint."""
    precision_of = precision_by(rules)
    layers = [
        [
            precision_of(part, each) if model.matrices(part, each) else UNQUANTISED
            for part in LAYER_PARTS
        ]
        for each in range(model.num_layers)
    ]
    return Formats(
        model, tuple(LayerFormats(*each) for each in layers), precision_of("lm_head", None)
    )
