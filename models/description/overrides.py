"""Fields that replace those of a checkpoint's config.json (`--hf-overrides`).

Owns which fields may be replaced and how they are merged with the checkpoint's: those that say how
far and by which rotation positions reach, and the epsilon of latents' norms, in which transformers
does not follow config.json. Knows no rope type's options
(models.description.rope_config); models.description.config calls it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from topspin.errors import ConfigError

_NAME = "--hf-overrides (model.hf_overrides)"
_LENGTH = "max_position_embeddings"
_NORM = "latent_norm_eps"
_ORIGINAL_LENGTH = "original_max_position_embeddings"
# transformers 4 and 5 name the same object.
_ROPE_NAMES = ("rope_scaling", "rope_parameters")
_FIELDS = (_LENGTH, "rope_theta", *_ROPE_NAMES, _NORM)


def overridden(raw: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """Return config.json's object `raw` with `overrides` in place; the rope object key by key.

    Raises ConfigError for a field that may not be replaced, and for a rotation that needs to know
    the length before it was extended.
    """
    for name in overrides:
        if name not in _FIELDS:
            raise ConfigError(
                f"{_NAME}: {name}: only {', '.join(_FIELDS)} can be replaced; the weights were "
                "trained for the rest"
            )
    rope = {**_rope_of(raw), **_given_rope(overrides)}
    merged = {name: value for name, value in raw.items() if name not in _ROPE_NAMES}
    merged["rope_parameters"] = rope
    merged |= {name: overrides[name] for name in (_LENGTH, _NORM) if name in overrides}
    if rope.get(_ORIGINAL_LENGTH) is not None:
        merged.pop(_ORIGINAL_LENGTH, None)  # the one beside the rope object would win
    elif rope.get("rope_type") in ("yarn", "llama3") and merged.get(_ORIGINAL_LENGTH) is None:
        # transformers would take the new max_position_embeddings, with which nothing is scaled.
        raise ConfigError(
            f"{_NAME}: rope_type {rope['rope_type']!r} needs {_ORIGINAL_LENGTH}, the length that "
            "the model was trained with"
        )
    return merged


def _given_rope(overrides: Mapping[str, object]) -> dict[str, object]:
    """Return the rope options of `overrides`, rope_theta among them."""
    given = [name for name in _ROPE_NAMES if name in overrides]
    if len(given) > 1:
        raise ConfigError(f"{_NAME}: {' and '.join(given)} are two names of one object; give one")
    for name in given:
        if not isinstance(overrides[name], dict):
            raise ConfigError(f"{_NAME}: {name} = {overrides[name]!r}: must be an object")
    theta = {"rope_theta": overrides["rope_theta"]} if "rope_theta" in overrides else {}
    return {**theta, **_rope_of(overrides)}


def _rope_of(fields: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of the rope object of `fields` in transformers 5's names; empty without one."""
    found = fields.get("rope_scaling") or fields.get("rope_parameters")
    rope = dict(found) if isinstance(found, dict) else {}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    return rope
