"""The precision of each weight of a model: rules, and their check against model and kernels.

Owns the names of formats and parts, and the formats of each kind of kernels. A weight's format
follows from its part, layer and expert alone, never from a node: all copies agree. Knows no
tensors. Read by the nodes' start-up, by `kernels.dispatch` and by topspin.plan.from_flags.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Literal

import msgspec

from topspin.devices import NodeRole
from topspin.errors import ConfigError

Format = Literal["none", "int8", "int4", "mxfp4", "fp8"]
Part = Literal["attention", "mlp", "experts", "lm_head"]

UNQUANTISED: Final = "none"
KERNEL_FORMATS: Final[dict[str, tuple[Format, ...]]] = {
    "cpu": ("int8", "int4", "mxfp4"),
    "triton": ("int8", "int4", "mxfp4", "fp8"),
}
"""By kernels of `kernels.dispatch`; the others have none."""
CODE_GROUPS: Final[dict[str, int]] = {"cpu": 32, "triton": 128}
"""By kernels: the inputs that share a step in int8 and int4."""
MXFP4_GROUP: Final = 32
"""The inputs that share a power of two in mxfp4, with all kernels."""
MXFP4_BITS: Final = 5
"""Of the integers as which mxfp4's numbers are read: twice a number, plus E2M1_ZERO."""
E2M1_ZERO: Final = 12
E2M1_INTEGERS: Final = tuple(
    E2M1_ZERO + sign * each for sign in (1, -1) for each in (0, 1, 2, 3, 4, 6, 8, 12)
)
"""Those integers by code: e2m1, four bits of which the highest is the sign."""
ROLE_PARTS: Final[dict[NodeRole, tuple[Part, ...]]] = {
    "attention": ("attention", "mlp", "lm_head"),
    "expert": ("experts",),
}
LM_HEAD_FORMATS: Final = ("none", "int8", "int4")
"""int8 has no visible cost. With int4 the most likely token is another one at about every eighth
position (docs/models.md, Quantised weights), so only a rule of part lm_head gives the head that."""


class PrecisionRule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A format, and the weights that it is for: those of all fields that are not None.

    `part`: the attention's projections, the MLPs of dense layers and shared experts, routed
    experts, or the LM head (one of LM_HEAD_FORMATS; embeddings that it is tied to keep theirs).
    `layers` counts decoder layers from 0 and excludes the LM head.
    `experts`, of part experts only, are ids as in the checkpoint. "none" is the model's dtype.
    Embeddings, routers and norms always have that.
    """

    format: Format
    part: Part | None = None
    layers: tuple[int, ...] | None = None
    experts: tuple[int, ...] | None = None

    def covers(self, part: Part, layer: int | None, expert: int | None) -> bool:
        """Return whether a weight is one of this rule's."""
        return (
            self.part in (None, part)
            and (self.layers is None or layer in self.layers)
            and (self.experts is None or expert in self.experts)
        )


Rules = tuple[PrecisionRule, ...]
"""The last one that covers a weight gives its format; without one it is "none"."""


def rules_of(quantization: Format) -> Rules:
    """Return the rules of `--quantization`."""
    if quantization == UNQUANTISED:
        return ()
    return (PrecisionRule(format=quantization), PrecisionRule(format="int8", part="lm_head"))


def format_of(
    rules: Sequence[PrecisionRule], part: Part, layer: int | None = None, expert: int | None = None
) -> Format:
    """Return the format of a weight; `layer` is None for the LM head, `expert` but for experts."""
    for rule in reversed(rules):
        if rule.covers(part, layer, expert):
            return rule.format
    return UNQUANTISED


def formats(rules: Sequence[PrecisionRule], role: NodeRole) -> frozenset[Format]:
    """Return the quantised formats of weights that nodes of `role` may hold."""
    found: set[Format] = set()
    for part in ROLE_PARTS[role]:
        for rule in reversed(rules):
            if rule.part not in (None, part) or not _can_cover(rule, part):
                continue
            found.add(rule.format)
            if rule.layers is None and rule.experts is None:
                break
    return frozenset(found - {UNQUANTISED})


def _can_cover(rule: PrecisionRule, part: Part) -> bool:
    return part != "lm_head" or rule.layers is None


def check_rules(
    rules: Sequence[PrecisionRule],
    *,
    num_layers: int,
    moe_layers: Collection[int],
    num_experts: int,
    kernels: dict[NodeRole, str],
) -> None:
    """Raise ConfigError if a rule names what the model, or the `kernels` of a role, do not have.

    `num_experts` is the number of routed experts per MoE layer.
    """
    for idx, rule in enumerate(rules):
        reason = _misfit(rule, num_layers, moe_layers, num_experts)
        if reason is not None:
            raise ConfigError(f"precision[{idx}] {_text(rule)}: {reason}")
    _check_head(rules)
    for role, name in kernels.items():
        known = KERNEL_FORMATS.get(name, ())
        for asked in sorted(formats(rules, role) - set(known)):
            idx = next(i for i in reversed(range(len(rules))) if rules[i].format == asked)
            raise ConfigError(
                f"precision[{idx}] {_text(rules[idx])}: the kernels {name} of the {role} nodes "
                f"have {', '.join(known) or 'no quantised format'}"
            )


def _check_head(rules: Sequence[PrecisionRule]) -> None:
    """Raise ConfigError if the LM head has no format of its own, or int4 without being named."""
    rule = next((rule for rule in reversed(rules) if rule.covers("lm_head", None, None)), None)
    if rule is None:
        return
    if rule.format not in LM_HEAD_FORMATS:
        raise ConfigError(
            f"precision: the LM head would be {rule.format}; its format is one of "
            f"{', '.join(LM_HEAD_FORMATS)}: add a rule with part lm_head"
        )
    if rule.format == "int4" and rule.part != "lm_head":
        raise ConfigError(
            "precision: the LM head would be int4 too, which changes many tokens: add a rule with "
            "part lm_head, of format int8, or int4 if you mean it"
        )


def _misfit(
    rule: PrecisionRule, num_layers: int, moe_layers: Collection[int], num_experts: int
) -> str | None:
    """Return why a rule does not fit the model; None if it does."""
    if rule.layers == () or rule.experts == ():
        return "an empty list covers nothing; leave the field out for all"
    if rule.experts is not None and rule.part != "experts":
        return "experts needs part experts"
    if rule.part == "lm_head" and rule.layers is not None:
        return "the LM head is in no layer"
    if rule.part == "experts" and not moe_layers:
        return "a dense model has no routed experts"
    for layer in rule.layers or ():
        if not 0 <= layer < num_layers:
            return f"the model has layers 0 to {num_layers - 1}"
        if rule.part == "experts" and layer not in moe_layers:
            return f"layer {layer} has no routed experts"
    if any(not 0 <= expert < num_experts for expert in rule.experts or ()):
        return f"the model has experts 0 to {num_experts - 1}"
    return None


def _text(rule: PrecisionRule) -> str:
    fields = msgspec.to_builtins(rule)
    named = (f"{name}: {value}" for name, value in fields.items() if value is not None)
    return "{" + ", ".join(named) + "}"
