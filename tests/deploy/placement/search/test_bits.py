"""The solvers of formats against every assignment."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.placement.search.bits import (
    Budget,
    Item,
    Option,
    Phase,
    Problem,
    all_choices,
    allocate,
    evaluate,
    least_divergence,
    restored,
    solve,
)
from topspin.plan.precision import Format

NAMES: tuple[Format, ...] = ("none", "int8", "int4")
amount = st.integers(1, 20).map(float)


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
                    decode_s=draw(amount) * 1e-5,
                    prefill_s=draw(amount) * 1e-4,
                )
                for name in NAMES[: draw(st.integers(1, 3))]
            )
            items.append(Item(layer, part, options))
    head = tuple(
        Option(name, draw(amount) * 1e6, 0.0 if name == "none" else 1e-3, draw(amount) * 1e-5, 0.0)
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
    return Problem(tuple(items), budgets, draw(amount) * 2e-3, decode, prefill)


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=40, deadline=None)
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
    found = least_divergence(problem.items, num_bytes)
    assert (found is None) == (best is None)
    if found is None or best is None:
        return
    chosen = [item.options[idx] for item, idx in zip(problem.items, found, strict=True)]
    assert sum(each.num_bytes for each in chosen) <= num_bytes * (1 + 1e-9)
    assert sum(each.kl for each in chosen) <= best * (1 + 1e-3) + 1e-12


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_allocator_keeps_the_bounds(problem: Problem) -> None:
    found = allocate(problem)
    if found is None:
        return
    value = evaluate(problem, found)
    assert value.fits
    assert value.objective_s >= min(
        each.objective_s
        for choice in all_choices(problem)
        if (each := evaluate(problem, choice)).fits
    ) * (1 - 1e-9)
    again = evaluate(problem, restored(problem, found))
    assert again.kl <= value.kl
    assert again.objective_s <= value.objective_s * (1 + 1e-9)


def test_the_most_sensitive_layer_keeps_its_weights() -> None:
    """Of layers alike in bytes and time the bound goes to those with the least divergence."""
    items = tuple(
        Item(
            layer,
            "experts",
            (Option("none", 2e6, 0.0, 2e-4, 2e-4), Option("int4", 5e5, kl, 1e-4, 1e-4)),
        )
        for layer, kl in enumerate((0.5, 0.01, 0.4, 0.02))
    )
    phase = Phase(1.0, 1, 0.0, True)
    problem = Problem(items, (), 0.05, phase, phase)
    assert solve(problem) == allocate(problem) == (0, 1, 0, 1)


def test_what_hides_behind_the_other_side_is_given_back() -> None:
    """Attention that waits for its experts anyway need not be quantised."""
    items = (
        Item(
            0,
            "attention",
            (Option("none", 1e6, 0.0, 2e-4, 2e-4), Option("int4", 1e6, 0.1, 1e-4, 1e-4)),
        ),
        Item(0, "experts", (Option("none", 1e6, 0.0, 9e-4, 9e-4),)),
    )
    overlapped = Phase(1.0, 3, 1e-5, False)
    assert allocate(Problem(items, (), 1.0, overlapped, overlapped)) == (0, 0)
    turns = overlapped._replace(takes_turns=True)
    assert allocate(Problem(items, (), 1.0, turns, turns)) == (1, 0)
