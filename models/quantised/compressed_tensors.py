"""Parses a `quantization_config` of method compressed-tensors into schemes.

Owns the formats that are read (packed and plain integers, fp8, nvfp4), and the precedence of
targets: names before patterns before classes, as in the compressed-tensors library. Imports no
torch. Called by models.quantised.config; models.quantised.modelopt shares some checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from models.description.config_fields import ConfigFields
from models.quantised.scheme import EVERY, NVFP4, Quantisation, Scheme, SchemeRule

_NVFP4_FORMAT: Final = "nvfp4-pack-quantized"
FORMATS: Final = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    _NVFP4_FORMAT,
)
STRATEGIES: Final = ("tensor", "channel", "group", "block")
_MIXED: Final = "mixed-precision"
_OF_NVFP4: Final = {
    "type": "float",
    "num_bits": 4,
    "strategy": "tensor_group",
    "group_size": NVFP4.group_size,
    "symmetric": True,
    "dynamic": False,
}


def parse_compressed_tensors(fields: ConfigFields, notes: list[str]) -> Quantisation:
    """Return the schemes of all config_groups; what is not followed goes to `notes`.

    quantization_status is not read: the tensors say how they are stored. Raises ConfigError as
    parse_quantisation.
    """
    note_cache(fields, "kv_cache_scheme", notes)
    for option in ("transform_config", "moe_sparsity_config"):
        if fields.raw.get(option):
            raise fields.error(option, "supported: null")
    sparsity = fields.raw.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise fields.error("sparsity_config", "supported: format dense")
    groups = fields.raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise fields.error("config_groups", "must be an object with at least one group")
    found: list[SchemeRule] = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise fields.error("config_groups", f"{name!r} must be an object")
        own = ConfigFields(group, source=f"{fields.source}: config_groups.{name}")
        scheme = _scheme(own, default_format=fields)
        found += [SchemeRule(target, scheme) for target in own.names("targets")]
    found.sort(key=_precedence)
    ignored = [SchemeRule(target, None) for target in fields.names("ignore")]
    return Quantisation(method="compressed-tensors", rules=(*ignored, *found))


def note_cache(fields: ConfigFields, option: str, notes: list[str]) -> None:
    """Note that an option of the cache, if it is given, is not followed."""
    if fields.raw.get(option):
        reason = "--kv-cache-dtype sets the precision of the cache; the option is ignored"
        notes.append(str(fields.error(option, reason)))


def expect_options(fields: ConfigFields, values: Mapping[str, object], *, of: str) -> None:
    """Raise ConfigError if an option that is given has another value than the one it has with `of`.

    None: it is not to be given.
    """
    for option, value in values.items():
        found = fields.raw.get(option)
        if found is not None and found != value:
            raise fields.error(
                option, f"supported: {'null' if value is None else value}, with {of}"
            )


def _precedence(rule: SchemeRule) -> int:
    if rule.target == EVERY:
        return 2
    return 1 if rule.target.startswith("re:") else 0


def _scheme(fields: ConfigFields, *, default_format: ConfigFields) -> Scheme | None:
    """Return the scheme of one group, None if its weights are not quantised."""
    weights = fields.raw.get("weights")
    if weights is None:
        return None
    if not isinstance(weights, Mapping):
        raise fields.error("weights", "must be an object")
    has_own = fields.raw.get("format") is not None
    of_format = fields if has_own else default_format
    supported = FORMATS if has_own else (*FORMATS, _MIXED)
    form = of_format.raw.get("format")
    if form not in supported:
        raise of_format.error("format", f"supported: {', '.join(FORMATS)}")
    own = ConfigFields(weights, source=f"{fields.source}.weights")
    if form == _MIXED:
        raise fields.error("format", f"a group of {_MIXED} needs one of {', '.join(FORMATS)}")
    if form == _NVFP4_FORMAT:
        expect_options(own, _OF_NVFP4, of=form)
        return NVFP4
    return _weights(own, is_packed=form == "pack-quantized")


def _weights(fields: ConfigFields, *, is_packed: bool) -> Scheme:
    kind = fields.raw.get("type", "int")
    if kind not in ("int", "float") or (is_packed and kind != "int"):
        raise fields.error("type", "supported: int, and float unless pack-quantized")
    bits = fields.positive_int("num_bits", default=8)
    if bits not in (4, 8) or (kind == "float" and bits != 8):
        raise fields.error("num_bits", "supported: 4 and 8 of type int, 8 of type float")
    if fields.raw.get("dynamic"):
        raise fields.error("dynamic", "supported: false, for weights")
    size = fields.optional_int("group_size")
    strategy = fields.raw.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy not in STRATEGIES:
        raise fields.error("strategy", f"supported: {', '.join(STRATEGIES)}")
    if strategy == "group" and (size is None or size <= 0):
        raise fields.error("group_size", "must be positive with strategy group")
    block = None
    if strategy == "block":
        sizes = fields.int_list("block_structure")
        if len(sizes) != 2 or min(sizes) <= 0:
            raise fields.error("block_structure", "must be two positive integers")
        block = (sizes[0], sizes[1])
    return Scheme(
        layout="packed" if is_packed else "plain",
        bits=bits,
        is_float=kind == "float",
        symmetric=fields.flag("symmetric", default=True),
        group_size=size if strategy == "group" else None,
        block=block,
        any_order=fields.raw.get("actorder") in ("group", "dynamic", True),
    )
