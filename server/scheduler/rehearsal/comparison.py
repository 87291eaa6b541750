"""A plan's expected times beside measured ones: how far off it is, and the largest cause.

Pure: figures in, text and ratios out. Called by service.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Final, NamedTuple

from server.scheduler.engine_facts import EngineFacts
from server.scheduler.rehearsal.steps import Measured
from topspin.plan.expected import Expected, ExpectedStep

CLOSE: Final = 0.05
"""A step that is off by less is as expected."""
AT_FAULT: Final = 1.25
"""A node that takes so many times as long as the others is named."""


class _Part(NamedTuple):
    """A part of a step, its times in seconds, and how often a step has it."""

    name: str
    measured_s: float
    expected_s: float
    times: float
    node: str = ""

    @property
    def excess_s(self) -> float:
        return (self.measured_s - self.expected_s) * self.times

    def __str__(self) -> str:
        times = f"{self.measured_s * 1e3:.3g} ms, expected {self.expected_s * 1e3:.3g}"
        return f"{self.name} {times}{f' ({self.node})' if self.node else ''}"


class Comparison(NamedTuple):
    """A line for people, and by phase and part measured over expected."""

    text: str
    ratios: dict[str, dict[str, float]]


def compare(
    expected: Expected, found: Mapping[str, Measured], facts: EngineFacts, *, num_local: int = 0
) -> Comparison:
    """Compare what was measured, by phase ("decode", "prefill"), with what was expected.

    `num_local` layers' experts were computed by attention nodes.
    """
    texts: list[str] = []
    ratios: dict[str, dict[str, float]] = {}
    for phase, asked in (("decode", expected.decode), ("prefill", expected.prefill)):
        measured = found.get(phase)
        if measured is None or not asked.step_s > 0:
            continue
        parts = _parts(asked, measured, facts, num_local)
        off = measured.step_s / asked.step_s - 1
        step = f"{measured.step_s * 1e3:.3g} ms for {asked.rows} rows"
        if abs(off) < CLOSE:
            texts.append(f"plan as expected in {phase} ({off:+.0%}: {step})")
        else:
            cause = max(parts, key=lambda part: part.excess_s if off > 0 else -part.excess_s)
            texts.append(f"plan off by {off:+.0%} in {phase} ({step}): {cause}")
        ratios[phase] = {"step": off + 1} | {
            part.name: part.measured_s / part.expected_s for part in parts if part.expected_s > 0
        }
    return Comparison("; ".join(texts) or "the plan was not measured: its step has no room", ratios)


def _parts(
    asked: ExpectedStep, measured: Measured, facts: EngineFacts, num_local: int
) -> list[_Part]:
    """Return the parts of a step; those of layers are of one layer and micro-batch."""
    m = asked.micro_batches
    hops, halves = m * (facts.num_moe_layers - num_local), m * facts.num_layers
    slowest = max(measured.attention_s.values())
    parts = [
        _Part(
            *("attention", slowest / halves, asked.attention_s, halves),
            node=_at_fault("attention", measured.attention_s),
        )
    ]
    if measured.experts_s and hops:
        slowest = max(measured.experts_s.values())
        parts.append(
            _Part(
                *("experts", slowest / hops, asked.experts_s, hops),
                node=_at_fault("expert", measured.experts_s),
            )
        )
        if measured.link_s is not None:
            parts.append(_Part("link", measured.link_s, asked.link_s, 2 * hops))
    if m == 1:  # else the parts overlap, and do not add up
        rest = [
            max(0.0, step_s - sum(getattr(part, name) * part.times for part in parts))
            for step_s, name in ((measured.step_s, "measured_s"), (asked.step_s, "expected_s"))
        ]
        parts.append(_Part("head, sampling and planning", rest[0], rest[1], times=1))
    return parts


def _at_fault(role: str, seconds: Mapping[int, float]) -> str:
    """Return which node takes much longer than the others, and how much; empty: none does."""
    worst = max(seconds, key=lambda node: seconds[node])
    others = [each for node, each in seconds.items() if node != worst]
    if not others or not seconds[worst] >= AT_FAULT * median(others) > 0:
        return ""
    return f"{role} {worst}: {seconds[worst] / median(others):.1f}x the other nodes"
