"""Parses the description that NVIDIA's ModelOpt writes of a checkpoint that it quantised.

Owns its algorithms that are read, its patterns of modules that stay as numbers, and the two forms
of a description: flat in config.json, or nested in a file of its own. Imports no torch. Called by
models.quantised.config.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Final

from models.description.config_fields import ConfigFields
from models.quantised.compressed_tensors import expect_options, note_cache
from models.quantised.scheme import EVERY, NVFP4, Quantisation, Scheme, SchemeRule

FILE: Final = "hf_quant_config.json"
"""Beside config.json; all that says it in older checkpoints."""
ALGORITHMS: Final = {
    "FP8": Scheme(layout="plain", bits=8, is_float=True),
    "NVFP4": NVFP4,
}
_NUM_BITS: Final = {"FP8": 8, "NVFP4": 4}


def parse_modelopt(fields: ConfigFields, notes: list[str]) -> Quantisation:
    """Return the scheme of all modules but the excluded ones; what is not followed is noted.

    Raises ConfigError as models.quantised.config.parse_quantisation.
    """
    nested = fields.raw.get("quantization")
    own = fields
    if nested is not None:
        if not isinstance(nested, Mapping):
            raise fields.error("quantization", "must be an object")
        own = ConfigFields(nested, source=f"{fields.source}: quantization")
    algorithm = own.raw.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise own.error("quant_algo", f"supported: {', '.join(ALGORITHMS)}")
    if own.raw.get("quantized_layers"):
        raise own.error("quantized_layers", "supported: one algorithm for all layers")
    scheme = ALGORITHMS[algorithm]
    expect_options(own, {"group_size": scheme.group_size}, of=algorithm)
    _check_groups(own, algorithm)
    for option in ("kv_cache_quant_algo", "kv_cache_scheme"):
        note_cache(own, option, notes)
    excluded = [*own.names("exclude_modules"), *own.names("ignore")]
    # Whatever is within an excluded module is excluded too.
    patterns = [form for name in excluded for form in (name, f"{name}.*")]
    rules = [SchemeRule(f"re:{fnmatch.translate(each)}", None) for each in patterns]
    return Quantisation(method="modelopt", rules=(*rules, SchemeRule(EVERY, scheme)))


def _check_groups(fields: ConfigFields, algorithm: str) -> None:
    """Raise ConfigError if config_groups, which config.json has too, say something else."""
    groups = fields.raw.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise fields.error("config_groups", "must be an object of objects")
    for name, group in groups.items():
        own = ConfigFields(group, source=f"{fields.source}: config_groups.{name}")
        expect_options(own, {"targets": [EVERY]}, of=algorithm)
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            raise own.error("weights", "must be an object")
        of_scheme = {
            "type": "float",
            "num_bits": _NUM_BITS[algorithm],
            "group_size": ALGORITHMS[algorithm].group_size,
            "dynamic": False,
        }
        of_weights = ConfigFields(weights, source=f"{own.source}.weights")
        expect_options(of_weights, of_scheme, of=algorithm)
