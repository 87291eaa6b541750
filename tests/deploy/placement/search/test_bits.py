"""Formats that the program chooses against every assignment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.placement.search.bits import (
    Budget,
    Item,
    Option,
    Phase,
    Problem,
    evaluate,
    least,
    solve,
)
from topspin.plan.precision import Format

NAMES: tuple[Format, ...] = ("none", "int8", "int4")
amount = st.integers(1, 20).map(float)


def all_choices(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield every assignment."""
    return itertools.product(*(range(len(item.options)) for item in problem.items))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Return a problem of one to three layers; times need not fall with the bits."""
    items = []
    for layer in range(draw(st.integers(1, 3))):
        for part in ("attention", "experts"):
            if part == "experts" and not draw(st.booleans()):
                continue
            options = tuple(
                Option(
                    name,
                    num_bytes=draw(amount) * 1e6,
                    kl=0.0 if name == "none" else draw(amount) * 1e-3,
                    seconds=(draw(amount) * 1e-5, draw(amount) * 1e-4),
                )
                for name in NAMES[: draw(st.integers(1, 3))]
            )
            items.append(Item(layer, part, options))
    head = tuple(
        Option(
            name,
            draw(amount) * 1e6,
            0.0 if name == "none" else 1e-3,
            (draw(amount) * 1e-5, 0.0),
        )
        for name in NAMES[:2]
    )
    items.append(Item(None, "lm_head", head))
    budgets = (
        Budget(draw(amount) * 3e6, {"attention": 1.0, "lm_head": 1.0}),
        Budget(draw(amount) * 3e6, {"experts": 2.0}),
    )
    takes_turns = draw(st.booleans())
    decode = Phase(draw(amount), draw(st.integers(1, 4)), draw(amount) * 1e-5, takes_turns)
    prefill = Phase(draw(amount), 1, draw(amount) * 1e-5, takes_turns)
    return Problem(tuple(items), budgets, draw(amount) * 2e-3, (decode, prefill))


@settings(max_examples=40)
@given(problems())
def test_the_program_finds_what_trying_everything_finds(problem: Problem) -> None:
    values = [evaluate(problem, choice) for choice in all_choices(problem)]
    best = min((value.objective_s for value in values if value.fits), default=None)
    found = solve(problem, gap=0.0)
    if best is None:
        assert found is None
        return
    assert found is not None
    value = evaluate(problem, found)
    assert value.fits
    assert abs(value.objective_s - best) <= 1e-9 * best
    # Nothing could be given back its precision for nothing.
    for idx, choice in enumerate(found):
        for other in range(len(problem.items[idx].options)):
            again = evaluate(problem, (*found[:idx], other, *found[idx + 1 :]))
            if problem.items[idx].options[other].kl < problem.items[idx].options[choice].kl:
                assert not again.fits or again.objective_s > value.objective_s


@settings(max_examples=40)
@given(problems(), amount)
def test_the_least_divergence_in_so_many_bytes(problem: Problem, room: float) -> None:
    num_bytes = room * 3e6
    all_of = [
        [item.options[idx] for item, idx in zip(problem.items, choice, strict=True)]
        for choice in all_choices(problem)
    ]
    best = min(
        (sum(o.kl for o in each) for each in all_of if sum(o.num_bytes for o in each) <= num_bytes),
        default=None,
    )
    found = least(problem.items, lambda option: option.kl, num_bytes=num_bytes)
    assert (found is None) == (best is None)
    if found is None or best is None:
        return
    chosen = [item.options[idx] for item, idx in zip(problem.items, found, strict=True)]
    assert sum(each.num_bytes for each in chosen) <= num_bytes * (1 + 1e-9)
    assert sum(each.kl for each in chosen) <= best * (1 + 1e-3) + 1e-12


def test_the_most_sensitive_layer_keeps_its_weights() -> None:
    """Of layers alike in bytes and time the bound goes to those with the least divergence."""
    items = tuple(
        Item(
            layer,
            "experts",
            (Option("none", 2e6, 0.0, (2e-4,)), Option("int4", 5e5, kl, (1e-4,))),
        )
        for layer, kl in enumerate((0.5, 0.01, 0.4, 0.02))
    )
    assert solve(Problem(items, (), 0.05, (Phase(),))) == (0, 1, 0, 1)


def test_what_hides_behind_the_other_side_is_given_back() -> None:
    """Attention that waits for its experts anyway need not be quantised."""
    items = (
        Item(
            0,
            "attention",
            (Option("none", 1e6, 0.0, (2e-4,)), Option("int4", 1e6, 0.1, (1e-4,))),
        ),
        Item(0, "experts", (Option("none", 1e6, 0.0, (9e-4,)),)),
    )
    overlapped = Phase(1.0, 3, 1e-5, False)
    assert solve(Problem(items, (), 1.0, (overlapped,))) == (0, 0)
    turns = overlapped._replace(takes_turns=True)
    assert solve(Problem(items, (), 1.0, (turns,))) == (1, 0)
