"""The storage of a checkpoint's quantised weights: a scheme per module, and its tensors' places.

Owns the schemes' fields, which of them covers a module, and the names of the tensors that make up
one matrix. Knows no numbers (and imports no torch). models.quantised.config parses schemes,
models.quantised.matrices reads by them, models.quantised.precision makes rules of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from models.checkpoints.checkpoint_index import TensorEntry
from topspin.errors import CheckpointError
from topspin.plan.precision import MXFP4_BITS, MXFP4_GROUP

Layout = Literal[
    "plain",
    "packed",
    "gptq",
    "awq",
    "mxfp4",
    "nvfp4",
    "mxfp4_gguf",
    "q4_0",
    "q4_1",
    "q4_k",
    "q5_0",
    "q5_1",
    "q5_k",
    "q6_k",
    "q8_0",
]

EVERY: Final = "Linear"
"""The target that covers every projection."""
_CODE_DTYPES: Final = ("F8_E4M3", "I8", "U8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How the matrices [O, I] of some modules are stored.

    `layout` plain: codes [O, I] as int8 or fp8 (e4m3). packed: `bits` wide, in int32 words along
    the inputs (compressed-tensors). gptq: words along the inputs of the transposed matrix. awq:
    along its outputs, in AWQ's order. mxfp4: pairs of e2m1 numbers in bytes, and powers of two as
    scales (OCP microscaling). nvfp4: the same pairs, fp8 numbers as scales, and a scale of the
    whole matrix. q4_0 and the like: GGUF's blocks, of scales and codes in one tensor. `group_size`:
    inputs that share a scale; None: all of them, or `block` (outputs, inputs). `symmetric`: the
    zero is in the middle of the codes and is not stored. `any_order`: the inputs of a group may lie
    anywhere (GPTQ's desc_act). `zero_offset` is added to a stored zero (1 in GPTQ's first format).
    """

    layout: Layout
    bits: int
    is_float: bool = False
    symmetric: bool = True
    group_size: int | None = None
    block: tuple[int, int] | None = None
    any_order: bool = False
    zero_offset: int = 0


NVFP4: Final = Scheme(layout="nvfp4", bits=MXFP4_BITS, group_size=16)
"""The only one of its layout."""


GGUF_SCHEMES: Final[Mapping[str, Scheme]] = {
    "MXFP4": Scheme(layout="mxfp4_gguf", bits=MXFP4_BITS, group_size=MXFP4_GROUP),
    "Q4_0": Scheme(layout="q4_0", bits=4, group_size=32),
    "Q4_1": Scheme(layout="q4_1", bits=4, group_size=32, symmetric=False),
    "Q4_K": Scheme(layout="q4_k", bits=4, group_size=32, symmetric=False),
    # One bit more than there is: MXFP4_BITS would mean numbers of another kind.
    "Q5_0": Scheme(layout="q5_0", bits=6, group_size=32),
    "Q5_1": Scheme(layout="q5_1", bits=6, group_size=32, symmetric=False),
    "Q5_K": Scheme(layout="q5_k", bits=6, group_size=32, symmetric=False),
    "Q6_K": Scheme(layout="q6_k", bits=6, group_size=16),
    "Q8_0": Scheme(layout="q8_0", bits=8, group_size=32),
}
"""By the type of a tensor in a GGUF file, which says it alone."""


class SchemeRule(NamedTuple):
    """The scheme of the modules that a target covers; None: they are not quantised.

    A target is a module's name, "re:" and a pattern that matches its beginning, or EVERY.
    """

    target: str
    scheme: Scheme | None

    def covers(self, module: str) -> bool:
        """Return whether `module` is one of the target's."""
        if self.target.startswith("re:"):
            return re.match(self.target.removeprefix("re:"), module) is not None
        return self.target in (EVERY, module)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantisation:
    """A checkpoint's quantisation: its method (as in config.json), and rules, the first wins.

    `plain` names modules that stay as numbers, "*" for any part: each, and those within. Tensors,
    where there are some, say it instead.
    """

    method: str
    rules: tuple[SchemeRule, ...]
    plain: tuple[str, ...] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a module, by its name in the checkpoint; None: unquantised."""
        return next((rule.scheme for rule in self.rules if rule.covers(module)), None)

    def presumed_scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a module of which there is no tensor to see."""
        patterns = [re.escape(each).replace(r"\*", r"[^.]+") for each in self.plain]
        if any(re.search(rf"(^|\.){each}(\.|$)", module) for each in patterns):
            return None
        return self.scheme_of(module)


class StoredNames(NamedTuple):
    """The tensors of one quantised matrix: of codes, scales, zeros, and the inputs' groups.

    `whole` is the scale of all its numbers, which multiplies the others, or divides them.
    """

    scheme: Scheme
    codes: str
    scales: str
    zeros: str | None
    order: str | None
    whole: str | None = None
    divides: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all its tensors."""
        return tuple(name for name in self[1:] if isinstance(name, str))


def find_stored(
    tensors: Mapping[str, TensorEntry], quantisation: Quantisation | None, name: str
) -> StoredNames | None:
    """Return where the matrix `name` ("...q_proj.weight") is, None if it is not quantised.

    Raises CheckpointError if its tensors are not those of its scheme.
    """
    if quantisation is None:
        return None
    module = name.removesuffix(".weight")
    entry = tensors.get(name)
    if entry is not None and entry.dtype in GGUF_SCHEMES:
        return StoredNames(GGUF_SCHEMES[entry.dtype], name, name, None, None)
    if entry is not None and entry.dtype not in _CODE_DTYPES:
        return None
    if entry is not None:
        layouts: tuple[Layout, ...] = ("nvfp4",) if entry.dtype == "U8" else ("plain",)
    elif f"{module}.weight_packed" in tensors:
        layouts = ("packed", "nvfp4")
    elif f"{module}.qweight" in tensors:
        layouts = ("gptq", "awq")
    elif f"{module}_blocks" in tensors:
        layouts = ("mxfp4",)
    else:
        return None
    scheme = quantisation.scheme_of(module)
    if scheme is None or scheme.layout not in layouts:
        raise CheckpointError(
            f"{module} is quantised in the checkpoint, but by its quantization_config "
            f"({quantisation.method}) it is "
            f"{'not' if scheme is None else f'stored as {scheme.layout}'}"
        )
    return _stored(tensors, scheme, name=name, module=module)


def _stored(
    tensors: Mapping[str, TensorEntry], scheme: Scheme, *, name: str, module: str
) -> StoredNames:
    zeros: str | None
    order: str | None = None
    if scheme.layout == "nvfp4":
        return _nvfp4(tensors, scheme, name=name, module=module)
    if scheme.layout == "plain":
        codes = name
        scales = _first(tensors, f"{name}_scale_inv", f"{name}_scale")
        zeros = None if scheme.symmetric else _first(tensors, f"{module}.weight_zero_point")
    elif scheme.layout == "packed":
        codes = f"{module}.weight_packed"
        scales = _first(tensors, f"{module}.weight_scale")
        zeros = None if scheme.symmetric else _first(tensors, f"{module}.weight_zero_point")
        order = f"{module}.weight_g_idx"
    elif scheme.layout == "mxfp4":
        codes, zeros = f"{module}_blocks", None
        scales = _first(tensors, f"{module}_scales")
    else:
        codes = f"{module}.qweight"
        scales = _first(tensors, f"{module}.scales")
        has_zeros = scheme.layout == "gptq" or f"{module}.qzeros" in tensors
        zeros = _first(tensors, f"{module}.qzeros") if has_zeros or not scheme.symmetric else None
        order = f"{module}.g_idx" if scheme.layout == "gptq" else None
    return StoredNames(scheme, codes, scales, zeros, order if order in tensors else None)


def _nvfp4(
    tensors: Mapping[str, TensorEntry], scheme: Scheme, *, name: str, module: str
) -> StoredNames:
    """Return the tensors of ModelOpt, or else those of compressed-tensors."""
    scales = _first(tensors, f"{module}.weight_scale")
    if name in tensors:
        whole = _first(tensors, f"{module}.weight_scale_2")
        return StoredNames(scheme, name, scales, None, None, whole)
    whole = _first(tensors, f"{module}.weight_global_scale")
    codes = f"{module}.weight_packed"
    return StoredNames(scheme, codes, scales, None, None, whole, divides=True)


def _first(tensors: Mapping[str, TensorEntry], *names: str) -> str:
    for name in names:
        if name in tensors:
            return name
    raise CheckpointError(f"tensor {' or '.join(names)} is missing beside quantised weights")
