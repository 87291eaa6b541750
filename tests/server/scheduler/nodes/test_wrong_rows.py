"""Steps whose rows are not numbers: those that are a node's fault, and the node."""

from __future__ import annotations

import pytest

from server.scheduler.nodes.roster import Member
from server.scheduler.nodes.wrong_rows import StepRows, WrongRows
from tests.server.scheduler.engine import Engine, make_config, make_request

A0, A1 = Member("attention", 0), Member("attention", 1)
E0, E1 = Member("expert", 0), Member("expert", 1)
NODES = [A0, A1, E0, E1]


def rows(*wrong: int, right: bool) -> StepRows:
    return StepRows(frozenset(wrong), right)


RIGHT, NONE = rows(right=True), rows(right=False)
TWO = rows(1, 2, right=True)


@pytest.mark.parametrize(
    ("steps", "is_wrong"),
    [
        ([TWO] * 3, True),
        ([TWO] * 2, False),
        ([TWO, TWO, RIGHT, TWO, TWO], False),
        ([TWO, TWO, NONE, TWO], True),
        ([rows(1, right=True), rows(2, right=True), rows(3, right=True)], False),
        ([rows(1, right=False), rows(2, right=False), rows(2, right=False)], True),
        ([rows(1, right=False)] * 9, False),
    ],
)
def test_three_steps_in_a_row_in_which_no_single_prompt_is_the_cause(
    steps: list[StepRows], is_wrong: bool
) -> None:
    wrong = WrongRows()
    for found in steps:
        assert wrong.take_verdict([A0, E0]) is None
        wrong.heard({0: found})
    assert (wrong.take_verdict([A0, E0]) is not None) == is_wrong
    assert wrong.take_verdict([A0, E0]) is None


@pytest.mark.parametrize(
    ("nodes", "other", "blamed"),
    [
        (NODES, RIGHT, [A0, E0, E1, A0]),
        (NODES, TWO, [E0, E1, A0, A1, E0]),
        ([A0, E0], None, [E0, A0, E0]),
        ([A0], None, [A0, A0]),
    ],
)
def test_the_likeliest_is_blamed_first_and_then_whoever_has_not_been(
    nodes: list[Member], other: StepRows | None, blamed: list[Member]
) -> None:
    wrong = WrongRows()
    for expected in blamed:
        for _ in range(3):
            wrong.heard({0: TWO} if other is None else {0: TWO, 1: other})
        assert wrong.take_verdict(nodes) == expected
        wrong.forget()


@pytest.mark.parametrize(("num_prompts", "is_wrong"), [(1, False), (2, True)])
def test_a_prompt_that_is_sent_again_or_has_many_choices_is_one(
    num_prompts: int, is_wrong: bool
) -> None:
    engine = Engine(make_config(), fails=lambda seq_id: True)
    for number in range(6):
        engine.add(make_request(f"r{number}", [number % num_prompts, 7], seed=number))
        if number % 2:
            while engine.turn():
                pass
    assert all(client.failure for client in engine.clients.values())
    assert (engine.policy.wrong_rows.take_verdict(NODES) is not None) == is_wrong
