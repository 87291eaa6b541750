"""Parses `quantization_config` of config.json into schemes, or refuses it by name.

Owns the methods fp8 (blocks, as DeepSeek and Qwen3 publish), GPTQ (also as AutoRound writes it),
AWQ and mxfp4 (as gpt-oss is published); models.quantised.compressed_tensors and
models.quantised.modelopt have the others. What a configuration says of activations is not followed:
rows stay in the kernels' own precision, which is no coarser. Imports no torch. Called by
models.description.config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from models.checkpoints.tensor_names import LM_HEAD
from models.description.config_fields import ConfigFields, read_json
from models.quantised.compressed_tensors import parse_compressed_tensors
from models.quantised.modelopt import FILE, parse_modelopt
from models.quantised.scheme import (
    EVERY,
    Quantisation,
    Scheme,
    SchemeRule,
)
from topspin.errors import ConfigError
from topspin.plan.precision import MXFP4_BITS, MXFP4_GROUP

METHODS: Final = (
    *("auto-round", "awq", "compressed-tensors", "fp8", "gguf", "gptq", "modelopt", "mxfp4"),
)
_PLAIN_BITS: Final = 16
"""AutoRound's word for what is not quantised."""
_OPTIONS: Final = ("quantization_config", "compression_config")


def read_quantisation(path: Path, fields: ConfigFields, notes: list[str]) -> Quantisation | None:
    """Return what config.json or, if it says nothing, ModelOpt's own file in `path` describes.

    Otherwise as parse_quantisation.
    """
    file = path / FILE
    if any(option in fields.raw for option in _OPTIONS) or not file.exists():
        return parse_quantisation(fields, notes)
    return parse_modelopt(ConfigFields(read_json(file), source=str(file)), notes)


def parse_quantisation(fields: ConfigFields, notes: list[str] | None = None) -> Quantisation | None:
    """Return how the checkpoint of config.json is quantised, None if it is not.

    What is not followed goes to `notes`. Raises ConfigError naming the option, its value and what
    is supported.
    """
    given = [option for option in _OPTIONS if fields.raw.get(option)]
    if not given:
        return None
    if len(given) > 1:
        raise ConfigError(f"{fields.source}: {' and '.join(given)}: one describes the weights")
    raw = fields.raw[given[0]]
    if not isinstance(raw, dict):
        raise fields.error(given[0], "must be an object")
    own = ConfigFields(raw, source=f"{fields.source}: {given[0]}")
    method = raw.get("quant_method")
    notes = [] if notes is None else notes
    if method == "compressed-tensors":
        return parse_compressed_tensors(own, notes)
    if method == "modelopt":
        return parse_modelopt(own, notes)
    if method == "gguf":
        return Quantisation(method=method, rules=())  # the tensors' types say it
    plain = _plain(own)
    if method == "fp8":
        return Quantisation(method=method, rules=(SchemeRule(EVERY, _fp8(own)),), plain=plain)
    if method == "gptq":
        return Quantisation(method=method, rules=_gptq(own), plain=plain)
    if method == "auto-round":
        return Quantisation(method=method, rules=_auto_round(own), plain=plain)
    if method == "awq":
        return Quantisation(method=method, rules=(SchemeRule(EVERY, _awq(own)),), plain=plain)
    if method == "mxfp4":
        scheme = Scheme(layout="mxfp4", bits=MXFP4_BITS, group_size=MXFP4_GROUP)
        return Quantisation(method=method, rules=(SchemeRule(EVERY, scheme),), plain=plain)
    raise own.error("quant_method", f"supported: {', '.join(METHODS)}")


def _plain(fields: ConfigFields) -> tuple[str, ...]:
    """Return what says which modules stay as numbers: the LM head, and modules_to_not_convert."""
    return (LM_HEAD.removesuffix(".weight"), *fields.names("modules_to_not_convert"))


def _fp8(fields: ConfigFields) -> Scheme:
    """Read the options of fp8: codes beside `weight_scale_inv`, per block or per matrix."""
    _among(fields, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    _among(fields, "activation_scheme", ("dynamic", "static"), default="dynamic")
    _among(fields, "scale_fmt", ("float", "ue8m0"), default="float")
    _among(fields, "expert_dtype", ("fp8",), default="fp8")
    if fields.raw.get("modules_to_convert"):
        raise fields.error("modules_to_convert", "supported: projections only")
    block = fields.raw.get("weight_block_size")
    if block is None:
        return Scheme(layout="plain", bits=8, is_float=True)
    sizes = fields.int_list("weight_block_size")
    if len(sizes) != 2 or min(sizes) <= 0:
        raise fields.error("weight_block_size", "must be two positive integers, or null")
    return Scheme(layout="plain", bits=8, is_float=True, block=(sizes[0], sizes[1]))


def _gptq(fields: ConfigFields) -> tuple[SchemeRule, ...]:
    """Read the options of GPTQ; `dynamic` has options for the modules that a pattern matches."""
    option = "checkpoint_format" if fields.raw.get("checkpoint_format") else "format"
    version = _among(fields, option, ("gptq", "gptq_v2"), default="gptq")
    plain = Scheme(
        layout="gptq", bits=4, symmetric=False, zero_offset=0 if version == "gptq_v2" else 1
    )
    scheme = _gptq_options(fields, plain)
    dynamic = fields.raw.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise fields.error("dynamic", "must be an object")
    rules = []
    for pattern, options in dynamic.items():
        target = f"re:{pattern.removeprefix('+:').removeprefix('-:')}"
        if pattern.startswith("-:"):
            rules.append(SchemeRule(target, None))
            continue
        if not isinstance(options, Mapping):
            raise fields.error("dynamic", f"{pattern!r} must have an object")
        own = ConfigFields(options, source=f"{fields.source}: dynamic[{pattern!r}]")
        rules.append(SchemeRule(target, _gptq_options(own, scheme)))
    return (*rules, SchemeRule(EVERY, scheme))


def _auto_round(fields: ConfigFields) -> tuple[SchemeRule, ...]:
    """Read the options of AutoRound where it packs as GPTQ; `extra_config` has those of modules."""
    if "gptq" not in str(fields.raw.get("packing_format")):
        raise fields.error("packing_format", "supported: auto_round:auto_gptq")
    _among(fields, "data_type", ("int",), default="int")
    scheme = _gptq_options(fields, Scheme(layout="gptq", bits=4, symmetric=False, zero_offset=1))
    extra = fields.raw.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(each, dict) for each in extra.values()):
        raise fields.error("extra_config", "must be an object of objects")
    rules = []
    for name, options in extra.items():
        own = ConfigFields(options, source=f"{fields.source}: extra_config[{name!r}]")
        is_plain = own.positive_int("bits", default=scheme.bits) >= _PLAIN_BITS
        rules.append(SchemeRule(name, None if is_plain else _gptq_options(own, scheme)))
    return (*rules, SchemeRule(EVERY, scheme))


def _gptq_options(fields: ConfigFields, base: Scheme) -> Scheme:
    """Return `base` with the options that are given."""
    scheme = base
    if "bits" in fields.raw:
        bits = fields.positive_int("bits")
        if bits not in (4, 8):
            raise fields.error("bits", "supported: 4, 8")
        scheme = replace(scheme, bits=bits)
    if "group_size" in fields.raw:
        scheme = replace(scheme, group_size=_group_size(fields))
    if "desc_act" in fields.raw:
        scheme = replace(scheme, any_order=fields.flag("desc_act", default=False))
    return scheme


def _awq(fields: ConfigFields) -> Scheme:
    """Read the options of AWQ; the tensors say which modules are converted."""
    option = "version" if fields.raw.get("version") else "format"
    _among(fields, option, ("gemm",), default="gemm")
    bits = fields.positive_int("bits", default=4)
    if bits != 4:
        raise fields.error("bits", "supported: 4")
    return Scheme(
        layout="awq",
        bits=4,
        group_size=_group_size(fields) if "group_size" in fields.raw else 128,
        symmetric=not fields.flag("zero_point", default=True),
    )


def _group_size(fields: ConfigFields) -> int | None:
    """Return the inputs of a group, None for all (-1)."""
    size = fields.optional_int("group_size")
    if size is None or size == 0 or size < -1:
        raise fields.error("group_size", "must be positive, or -1")
    return None if size == -1 else size


def _among(fields: ConfigFields, option: str, supported: tuple[str, ...], *, default: str) -> str:
    """Return an option in lower case, which must be one of `supported`."""
    value = fields.raw.get(option)
    if value is None:
        return default
    if not isinstance(value, str) or value.lower() not in supported:
        raise fields.error(option, f"supported: {', '.join(supported)}")
    return value.lower()
