"""The quantization_config of a written checkpoint, in the form of compressed-tensors.

Owns which modules each group targets and which are ignored, as patterns of layers, and the tensors
of a module. Imports torch for these only. Called by deploy.quantisation.writing; the library
compressed-tensors, and engines that follow it, read the result.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deploy.quantisation.grids import BITS, BLOCK, Coded
from topspin.plan.precision import Format

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_KINDS: Final[dict[Format, str]] = {
    "int4": "pack-quantized",
    "int8": "pack-quantized",
    "fp8": "float-quantized",
}


def quantisation_config(
    formats: Mapping[str, Format], *, group: int, symmetric: bool
) -> dict[str, Any]:
    """Return the configuration of modules with their formats, "none" of those to be ignored.

    `group` and `symmetric` (of int4) as they were quantised.
    """
    by_format: dict[Format, list[str]] = defaultdict(list)
    for name, weight_format in formats.items():
        by_format[weight_format].append(name)
    groups = {
        f"group_{idx}": {
            "targets": patterns(by_format[weight_format]),
            "weights": _weights(weight_format, group=group, symmetric=symmetric),
            "input_activations": None,
            "output_activations": None,
            "format": _KINDS[weight_format],
        }
        for idx, weight_format in enumerate(each for each in _KINDS if each in by_format)
    }
    kinds = {each["format"] for each in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": patterns(by_format["none"]),
        "config_groups": groups,
    }


def _weights(weight_format: Format, *, group: int, symmetric: bool) -> dict[str, Any]:
    common = {"dynamic": False, "observer": "minmax", "actorder": None}
    if weight_format == "fp8":
        own: dict[str, Any] = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "block",
            "block_structure": [BLOCK, BLOCK],
        }
    else:
        own = {
            "num_bits": BITS[weight_format],
            "type": "int",
            "symmetric": symmetric or weight_format == "int8",
            "strategy": "group",
            "group_size": group,
        }
    return own | common


def patterns(names: Iterable[str]) -> list[str]:
    """Return names, or patterns ("re:...") that match exactly these: their numbers are layers
    first, then maybe experts."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        layer, *experts = _NUMBER.findall(name) or [""]
        found[_NUMBER.sub("#", name)][layer].update(experts)
    result: list[str] = []
    for form, layers in found.items():
        if "#" not in form:
            result.append(form)
            continue
        alike: dict[frozenset[str], list[str]] = defaultdict(list)
        for layer, members in layers.items():
            alike[frozenset(members)].append(layer)
        for experts_of, same in alike.items():
            first, *rest = (re.escape(each) for each in form.split("#"))
            pattern = f"re:^{first}{_any(same)}{rest[0]}"
            if len(rest) > 1:
                pattern += _any(experts_of) + rest[1]
            result.append(pattern + "$")
    return result


def _any(numbers: Iterable[str]) -> str:
    return "(" + "|".join(sorted(numbers, key=int)) + ")"


def module_tensors(coded: Coded, *, symmetric: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a module by their last names, scales in `dtype`."""
    scales = coded.scales.to(dtype)
    if coded.zeros is None:
        return {"weight": coded.codes, "weight_scale": scales}
    bits = BITS[coded.weight_format]
    tensors = {
        "weight_packed": packed(coded.codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(coded.codes.shape, dtype=torch.int64),
    }
    if bits == 4 and not symmetric:
        tensors["weight_zero_point"] = packed(coded.zeros.T, bits).T.contiguous()
    return tensors


def packed(codes: Tensor, bits: int) -> Tensor:
    """Return codes u8[O, I] as i32[O, ceil(I * bits / 32)], the first in a word's lowest bits."""
    padded = F.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    if bits == 4:
        padded = padded[:, 0::2] | padded[:, 1::2] << 4
    return padded.reshape(-1).view(torch.int32).view(len(codes), -1)
