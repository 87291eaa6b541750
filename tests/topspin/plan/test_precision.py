"""Precision rules: the last one that covers a weight counts; what does not fit is refused."""

from __future__ import annotations

import msgspec
import pytest

from topspin.errors import ConfigError
from topspin.plan.precision import (
    Format,
    Part,
    PrecisionRule,
    check_rules,
    format_of,
    formats,
    rules_of,
)

LAYERS, EXPERTS = 3, 4
PARTS: tuple[Part, ...] = ("attention", "mlp", "experts")
MIXED = (
    PrecisionRule(format="int8"),
    PrecisionRule(format="int4", part="experts"),
    PrecisionRule(format="none", layers=(0,)),
    PrecisionRule(format="fp8", part="experts", layers=(1, 2), experts=(3, 0)),
)


def check(
    *rules: PrecisionRule, attention: str = "triton", expert: str = "triton", dense: bool = False
) -> None:
    check_rules(
        rules,
        num_layers=LAYERS,
        moe_layers=() if dense else (1, 2),
        num_experts=0 if dense else EXPERTS,
        kernels={"attention": attention} if dense else {"attention": attention, "expert": expert},
    )


def test_the_last_rule_that_covers_a_weight_counts() -> None:
    assert format_of(MIXED, "lm_head") == "int8"  # in no layer, so not in layer 0
    assert [format_of(MIXED, "attention", layer) for layer in range(3)] == ["none", "int8", "int8"]
    assert format_of(MIXED, "mlp", 0) == "none"
    found = [[format_of(MIXED, "experts", layer, e) for e in range(EXPERTS)] for layer in (0, 1)]
    assert found == [["none"] * EXPERTS, ["fp8", "int4", "int4", "fp8"]]
    assert format_of(MIXED[::-1], "experts", 1, 3) == "int8"
    assert format_of((), "experts", 1, 3) == "none"


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "mxfp4", "fp8"])
def test_quantization_is_of_every_part_and_8_bits_for_the_head(quantization: Format) -> None:
    rules = rules_of(quantization)
    assert {format_of(rules, part, 1, 0) for part in PARTS} == {quantization}
    assert format_of(rules, "lm_head") == ("none" if quantization == "none" else "int8")
    check(*rules)


def test_a_role_needs_the_formats_of_its_own_weights() -> None:
    assert formats((), "attention") == formats(rules_of("none"), "expert") == frozenset()
    assert formats(rules_of("int4"), "attention") == {"int4", "int8"}
    assert formats(rules_of("int4"), "expert") == {"int4"}
    assert formats(MIXED, "attention") == {"int8"}
    assert formats(MIXED, "expert") == {"int4", "fp8"}
    only = (PrecisionRule(format="int4", layers=(1,)), PrecisionRule(format="int8", part="mlp"))
    assert formats(only, "attention") == {"int4", "int8"}


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (PrecisionRule(format="int4", layers=(1, 3)), r"layers 0 to 2"),
        (PrecisionRule(format="int4", layers=(-1,)), r"layers 0 to 2"),
        (PrecisionRule(format="int4", part="experts", experts=(4,)), r"experts 0 to 3"),
        (PrecisionRule(format="int4", part="experts", experts=(-1,)), r"experts 0 to 3"),
        (PrecisionRule(format="int4", experts=(1,)), r"experts needs part experts"),
        (PrecisionRule(format="int4", part="mlp", experts=(1,)), r"experts needs part experts"),
        (PrecisionRule(format="int4", part="experts", layers=(0,)), r"layer 0 has no routed"),
        (PrecisionRule(format="int8", part="lm_head", layers=(0,)), r"in no layer"),
        (PrecisionRule(format="int8", layers=()), r"an empty list covers nothing"),
    ],
)
def test_a_rule_for_what_the_model_lacks_is_refused_by_name(
    rule: PrecisionRule, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"precision\[1\] {{format: {rule.format}.*{reason}"):
        check(PrecisionRule(format="int8"), rule)


def test_a_dense_model_has_no_expert_rules() -> None:
    check(*rules_of("int8"), dense=True)
    with pytest.raises(ConfigError, match="a dense model has no routed experts"):
        check(PrecisionRule(format="int8", part="experts"), dense=True)


def test_kernels_without_a_format_are_named() -> None:
    check(*MIXED, attention="cpu")
    with pytest.raises(ConfigError, match=r"precision\[3\].*kernels cpu of the expert nodes have "):
        check(*MIXED, expert="cpu")
    with pytest.raises(ConfigError, match=r"kernels deterministic .* no quantised format"):
        check(*rules_of("int8"), attention="deterministic")
    check(PrecisionRule(format="none"), attention="deterministic", expert="reference")


@pytest.mark.parametrize("kernels", ["cpu", "triton"])
def test_only_a_rule_that_names_the_lm_head_gives_it_4_bits(kernels: str) -> None:
    every, head = PrecisionRule(format="int4"), PrecisionRule(format="int4", part="lm_head")
    with pytest.raises(ConfigError, match=r"the LM head would be int4 too.* add a rule with part"):
        check(every, attention=kernels, expert=kernels)
    for rules in ((every, head), (head,), (*rules_of("int8"), head), (*rules_of("int4"), head)):
        check(*rules, attention=kernels, expert=kernels)
        assert format_of(rules, "lm_head") == "int4"
        assert "int4" in formats(rules, "attention")
    assert formats((head,), "expert") == frozenset()
    with pytest.raises(ConfigError, match=r"precision\[0\].*deterministic .* no quantised format"):
        check(head, attention="deterministic", expert="deterministic")


@pytest.mark.parametrize("part", [None, "lm_head"])
def test_the_lm_head_has_no_fp8(part: Part | None) -> None:
    with pytest.raises(ConfigError, match=r"the LM head would be fp8; .* none, int8, int4"):
        check(PrecisionRule(format="fp8", part=part))


def test_rules_travel_as_json() -> None:
    text = msgspec.json.encode(MIXED)
    assert msgspec.json.decode(text, type=tuple[PrecisionRule, ...]) == MIXED
    with pytest.raises(msgspec.ValidationError, match="layer"):
        msgspec.json.decode(b'{"format": "int4", "layer": 1}', type=PrecisionRule)
