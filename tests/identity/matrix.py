"""A few engines in which every allowed pair of features meets.

Owns the choice of rows: greedy, and the same in every run. The features are those of
topspin.plan.rules.features that processes on shared cores can have, models, and second copies of
experts. Knows no checkpoint: a row is the names that a plan is given (tests.topspin.plan.given).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import combinations

from msgspec.structs import replace

from tests.structs import changed
from tests.topspin import plans
from tests.topspin.plan.given import given, two_expert_nodes
from tests.topspin.plans import plan
from topspin.errors import ConfigError
from topspin.plan.rules.checks import check_model, check_plan
from topspin.plan.rules.features import FEATURES
from topspin.plan.rules.model_facts import ModelFacts
from topspin.plan.spec import EnginePlan

COPIES = "copies of experts"
DENSE_MODEL = "llama_bias"
# Sinks, windows in every second layer, experts with biases and clamped; a gated shared expert, and
# windows and dense layers here and there; a sigmoid router with groups and a bias, partly rotated
# and normed heads, a dense first layer and a plain shared expert; latents; biases, and heads of 24
# numbers.
LATENT_MODEL = "deepseek_v3"
MODELS = ("gpt_oss", "qwen2_moe_sparse_step", "glm4_moe", LATENT_MODEL, DENSE_MODEL)
IN_TURN = ("minimax_m2", "qwen3_moe", "ernie4_5_moe_sparse_step", "olmoe_clip_qkv")
"""Those of rows that need none of MODELS: heads of 32 numbers, normed all together or each; of 16,
rotated in neighbouring pairs, or clipped."""
HEAD = "drafts by the model's own head"
WITH_A_HEAD = ("glm4_moe", LATENT_MODEL)
BEYOND_A_MODEL = {
    *(frozenset((model, "spill to a file")) for model in MODELS),
    *(frozenset((LATENT_MODEL, each)) for each in ("key retrieval", "spill to the host's memory")),
    *(frozenset((model, HEAD)) for model in MODELS if model not in WITH_A_HEAD),
    frozenset((HEAD, "spill to a file")),
}
"""Pairs that a model's heads or windows rule out, as a plan's check or a node's start says."""
ROUNDING = ("dtype", "payload", "precision", "keys", "rules", "retrieval", "spill")
Pair = frozenset[str]
Row = tuple[str, ...]
MOE, DENSE = (
    (facts, plan(facts, restart=False, num_threads=1, dtype="float32", micro_batches=1))
    for facts in (plans.FACTS, plans.DENSE)
)
"""The facts of a model, and a plan of one node of each role for it."""
TRIED = [name for name, feature in FEATURES.items() if not feature.needs]


def axes() -> list[list[str]]:
    """Return names by axis: a row has one of each, or none."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in TRIED:
        found[FEATURES[name].axis].append(name)
    return [list(MODELS), *found.values(), [COPIES]]


def given_to(facts: ModelFacts, base: EnginePlan, names: Collection[str]) -> EnginePlan:
    """Return `base`, a plan of one node of each role, with the features `names`, unchecked."""
    if COPIES in names:
        base = two_expert_nodes(base, facts)
        experts = [replace(node, experts=node.experts + 2) for node in base.experts]
        parts = {"nodes": (*base.attention, *experts), "balance.interval_s": 0.0}
        base = changed(base, parts)
    return given(base, facts, [name for name in names if name in FEATURES])


def made_of(facts: ModelFacts, base: EnginePlan, names: Collection[str]) -> EnginePlan:
    """Return such a plan; raises ConfigError if the features do not go together."""
    made = given_to(facts, base, names)
    check_plan(made)
    check_model(made, facts)
    return made


def features_of(made: EnginePlan) -> set[str]:
    """Return the features that a plan has."""
    return {
        name
        for name, feature in FEATURES.items()
        if any(feature.is_in(made, node) for node in made.nodes)
    }


@cache
def found_in(names: Pair | Row) -> frozenset[str]:
    """Return the names that an engine of `names` has, and maybe more; (): it is refused."""
    facts, base = DENSE if DENSE_MODEL in names else MOE
    try:
        made = made_of(facts, base, names)
    except ConfigError:
        return frozenset()
    found = features_of(made) | set(MODELS).intersection(names)
    has_copies = sum(node.experts for node in made.experts) > facts.num_experts > 0
    return frozenset(found | ({COPIES} if has_copies else set()))


def allowed_pairs() -> list[Pair]:
    """Return the pairs of different axes that an engine can have."""
    names = [name for axis in axes() for name in axis]
    own = {name: idx for idx, axis in enumerate(axes()) for name in axis}
    pairs = [frozenset(pair) for pair in combinations(names, 2) if own[pair[0]] != own[pair[1]]]
    return [pair for pair in pairs if pair <= found_in(pair) and pair not in BEYOND_A_MODEL]


def covering_rows() -> list[Row]:
    """Return rows of names, in the order of the axes, that have every allowed pair.

    First without features that round: their tokens are those of transformers.
    """
    pairs = allowed_pairs()
    exact = [pair for pair in pairs if not is_rounded(pair)]
    return [*_covering(exact), *_covering(pairs, met=exact)]


def is_rounded(names: Iterable[str]) -> bool:
    """Return whether one of `names` makes numbers others than in the model's own arithmetic."""
    return any(name in FEATURES and FEATURES[name].axis in ROUNDING for name in names)


def _covering(allowed: Collection[Pair], met: Collection[Pair] = ()) -> list[Row]:
    """Return rows of `allowed` pairs only, that have all of them but those `met` already."""
    left = dict.fromkeys(pair for pair in allowed if pair not in set(met))
    rows = []
    while left:
        row = _next_row(next(iter(left)), set(allowed), left)
        found = found_in(frozenset(row))
        left = dict.fromkeys(pair for pair in left if not pair <= found)
        rows.append(tuple(name for axis in axes() for name in axis if name in row))
    return rows


def _next_row(first: Pair, allowed: Collection[Pair], left: Collection[Pair]) -> set[str]:
    """Return a row with the pair `first` that has as many as it can of those `left`."""
    row = set(first)
    for axis in axes():
        if row & set(axis):
            continue
        gains = {
            name: sum(frozenset((name, other)) in left for other in row)
            for name in axis
            if all(frozenset((name, other)) in allowed for other in row)
        }
        # Also without a gain: what a later name has to do with it may be left.
        for name in sorted(filter(gains.get, gains), key=lambda name: -gains[name]):
            if (longer := frozenset(row | {name})) <= found_in(longer):
                row.add(name)
                break
    return row


def some_of(rows: Sequence[Row]) -> list[Row]:
    """Return a few of the rows that have every name, chosen greedily."""
    left = {name for row in rows for name in row}
    found = []
    while left:
        found.append(max(rows, key=lambda row: len(left.intersection(row))))
        left.difference_update(found[-1])
    return found
