"""The draft lane of a trace: passes, and their overlap with attention nodes' steps."""

from __future__ import annotations

import pytest

from app.cli.trace.drafts import drafting_of
from app.cli.trace.export import chrome_trace
from app.cli.trace.report import Lane, Span
from topspin.trace import Kind


def lane(role: str, index: int, *spans: tuple[int, int, Kind]) -> Lane:
    return Lane(role, index, 0, [Span(a, b, 0, kind, 0, 0, 0) for a, b, kind in spans])


STEPS = (
    (0, 10, Kind.PLAN_RECEIVED),
    (10, 20, Kind.STEP_BEGAN),
    (20, 60, Kind.RALLIED),
    (60, 70, Kind.STEP_ENDED),
    (70, 100, Kind.PLAN_RECEIVED),
    (100, 110, Kind.STEP_BEGAN),
    (110, 200, Kind.STEP_ENDED),
)


def test_passes_overlap_with_steps_between_inputs_and_tokens() -> None:
    drafts = lane(
        "draft",
        0,
        (0, 20, Kind.VERDICTS_RECEIVED),
        (20, 30, Kind.OFFERED),
        (30, 60, Kind.DRAFTED),  # within a step
        (60, 80, Kind.DRAFTED),  # half of it
        (80, 105, Kind.DRAFTED),  # while inputs are prepared
        (105, 130, Kind.DRAFTED),  # 20 of 25
    )
    found = drafting_of([lane("attention", 0, *STEPS), drafts])
    assert [(each.name, each.num_passes) for each in found] == [("draft 0", 4)]
    assert found[0].overlap == pytest.approx((30 + 10 + 20) / 100)
    assert found[0].pass_s == pytest.approx(25e-9)


def test_steps_of_several_nodes_count_once() -> None:
    other = lane("attention", 1, (30, 40, Kind.STEP_BEGAN), (40, 90, Kind.STEP_ENDED))
    drafts = lane("draft", 1, (0, 10, Kind.DRAFTED), (10, 100, Kind.DRAFTED))
    (found,) = drafting_of([other, lane("attention", 0, *STEPS), drafts])
    assert found.overlap == pytest.approx(70 / 100)


def test_an_idle_draft_node_has_no_line() -> None:
    idle = lane("draft", 0, (0, 50, Kind.VERDICTS_RECEIVED))
    assert drafting_of([lane("attention", 0, *STEPS), idle]) == []


def test_perfetto_shows_passes_and_waits_apart() -> None:
    drafts = lane("draft", 0, (0, 20, Kind.VERDICTS_RECEIVED), (20, 30, Kind.DRAFTED))
    events = chrome_trace([drafts])["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    slices = {each["name"]: names[each["tid"]] for each in events if each["ph"] == "X"}
    assert slices == {"verdicts received": "waits", "drafted": "steps"}
