"""The report of a search: as JSON beside the plan, and as tables for people.

Owns both forms. Called by deploy.placement.command; deploy.placement.picture draws its front.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.placement.answers import (
    Offer,
    answers_of,
    flips_of,
    front_of,
    load_unit,
    losers_of,
    offers_of,
    over_two_hosts,
    refusal_of,
)
from deploy.placement.cost import unmeasured
from deploy.placement.search.drafts import Decision
from deploy.placement.search.rating import milliseconds
from deploy.placement.search.search import Inputs, Member, Result
from deploy.placement.workload import asked_load
from deploy.placement.write import local_experts_of


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the report."""


class EngineReport(_Part, frozen=True, kw_only=True):
    """An engine of the fleet. `binding`: what keeps it from carrying more than `most_load`.

    `layer_ends`: the layer before which each range ends, by its device; empty: layers are not cut.
    """

    copies: int
    engine: str
    micro_batches: int
    max_num_seqs: int
    max_num_batched_tokens: int
    precision: str
    experts_per_node: tuple[int, ...]
    local_layers: int
    local_when: str
    local_reason: str
    layer_ends: tuple[int, ...]
    load: float
    most_load: float
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    kl: float
    binding: str
    file: str = ""


class FrontPoint(_Part, frozen=True, kw_only=True):
    """An offer that no other beats in price, TTFT, TPOT, tokens per second and divergence."""

    engine: str
    copies: int
    precision: str
    price_per_hour: float
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    kl: float


class LostClass(_Part, frozen=True, kw_only=True):
    """A kind of engine that was not taken, by its best, and why."""

    kind: str
    engine: str
    reason: str


class FlipReport(_Part, frozen=True, kw_only=True):
    """A change that would change the outcome."""

    change: str
    outcome: str


class Report(_Part, frozen=True, kw_only=True):
    """All that a search says. `load` is asked for, `most_load` the fleet's.

    `load_unit`: requests/s or users. `estimates`: per device of the plan the times that its profile
    has no table of, so that they are the roofline's. `refusal`: "" with a plan.
    `drafts`: what was decided about them, by engine; empty: the workload asks for none.
    """

    objective: str
    load_unit: str
    price_per_hour: float
    load: float
    most_load: float
    is_exact: bool
    engines: tuple[EngineReport, ...]
    front: tuple[FrontPoint, ...]
    losers: tuple[LostClass, ...]
    answers: tuple[str, ...]
    over_two_hosts: tuple[str, ...]
    flips: tuple[FlipReport, ...]
    estimates: tuple[str, ...] = ()
    refusal: str = ""
    drafts: tuple[str, ...] = ()

    def with_files(self, files: Sequence[str]) -> Report:
        """Return the report with the plans' files, one per engine."""
        engines = tuple(
            msgspec.structs.replace(engine, file=file)
            for engine, file in zip(self.engines, files, strict=True)
        )
        return msgspec.structs.replace(self, engines=engines)

    def to_json(self) -> bytes:
        """Return it as readable JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def report_of(inputs: Inputs, result: Result, drafts: Sequence[Decision] = ()) -> Report:
    """Return the report of a search."""
    rater = inputs.rater()
    offers = offers_of(inputs, rater, result.ratings)
    return Report(
        objective=inputs.workload.objective,
        load_unit=load_unit(inputs),
        price_per_hour=result.price + sum(each.price for each in drafts),
        load=asked_load(inputs.workload),
        most_load=result.load,
        is_exact=result.is_exact,
        engines=tuple(_engine(inputs, member) for member in result.members),
        front=tuple(map(_front_point, front_of(offers))),
        losers=tuple(
            LostClass(kind=each.name, engine=each.engine, reason=each.reason)
            for each in losers_of(inputs, result, offers)
        ),
        answers=tuple(answers_of(inputs, result, offers)),
        over_two_hosts=tuple(over_two_hosts(inputs, rater, result)),
        flips=tuple(
            FlipReport(change=each.change, outcome=each.outcome)
            for each in flips_of(inputs, result)
        ),
        estimates=tuple(_estimates(inputs, result.members)),
        refusal="" if result.members else refusal_of(inputs, result),
        drafts=tuple(
            f"{member.rating.layout}: {each.text}"
            for member, each in zip(result.members, drafts, strict=False)
        ),
    )


def _estimates(inputs: Inputs, members: Sequence[Member]) -> list[str]:
    """Return, by device, what no table of its profile answers for."""
    found: dict[str, set[str]] = {}
    for member in members:
        engine = member.rating.engine
        assert engine is not None
        slots = [("attention", slot) for slot, _ in engine.layout.attention]
        slots += [("stage", slot) for slot in engine.layout.stages]
        slots += [("expert", slot) for slot, _ in engine.layout.experts]
        if engine.num_local:
            slots += [("expert", slot) for slot, _ in engine.layout.attention]
        for role, slot in slots:
            profile = slot.device.profile
            threads = max(1, slot.threads)
            missing = unmeasured(
                profile, inputs.model, engine.formats.of, role=role, threads=threads
            )
            found.setdefault(f"{profile.name} ({profile.source})", set()).update(missing)
    return [f"{name}: {', '.join(sorted(each))}" for name, each in found.items() if each]


def _engine(inputs: Inputs, member: Member) -> EngineReport:
    rating = member.rating
    local = local_experts_of(inputs.rater(), rating)
    engine, point = rating.engine, rating.point
    assert engine is not None
    assert point is not None
    return EngineReport(
        copies=member.copies,
        engine=str(rating.layout),
        micro_batches=engine.micro_batches,
        max_num_seqs=rating.max_num_seqs,
        max_num_batched_tokens=engine.batched_tokens,
        precision=str(engine.formats),
        experts_per_node=engine.held,
        local_layers=0 if local is None else len(local.experts.layers),
        local_when="" if local is None else local.experts.when,
        local_reason="" if local is None else local.reason,
        layer_ends=engine.ends,
        load=rating.load(inputs.workload),
        most_load=rating.most_load,
        ttft_s=point.ttft_s,
        tpot_s=point.tpot_s,
        tokens_per_s=point.rate * inputs.workload.output.average,
        kl=engine.formats.kl,
        binding=rating.binding.text,
    )


def _front_point(offer: Offer) -> FrontPoint:
    return FrontPoint(
        engine=str(offer.rating.layout),
        copies=offer.copies,
        precision=str(offer.rating.formats),
        price_per_hour=offer.price,
        ttft_s=offer.ttft_s,
        tpot_s=offer.tpot_s,
        tokens_per_s=offer.tokens_per_s,
        kl=offer.kl,
    )


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the report as tables."""
    out = Console(highlight=False) if console is None else console
    if report.engines:
        out.print(_engines(report))
        for engine in report.engines:
            if engine.local_reason:
                what = f"{engine.engine}: {engine.local_layers} layers local, {engine.local_when}"
                out.print(f"{what}: {engine.local_reason}")
        whole = "exact over its grids" if report.is_exact else "a heuristic: see docs/planner.md"
        out.print(
            f"{report.load:.4g} {report.load_unit}, {report.most_load:.4g} at most, at "
            f"{report.price_per_hour:.4g} per hour ({report.objective}; the search was {whole})"
        )
    if report.front:
        out.print(_front(report))
    if report.losers:
        table = Table("kind", "best of it", "why not", title="Not taken")
        for each in report.losers:
            table.add_row(each.kind, each.engine, each.reason)
        out.print(table)
    for line in (*report.drafts, *report.answers, *report.over_two_hosts):
        out.print(line)
    for line in report.estimates:
        out.print(f"Estimated, not measured, on {line}.")
    for flip in report.flips:
        out.print(f"With {flip.change}: {flip.outcome}.")


def _engines(report: Report) -> Table:
    table = Table("engine", "copies", "m", "sequences", "tokens", "TTFT", "TPOT", title="The plan")
    for name in ("tokens/s", "most load", "kl", "precision", "binds"):
        table.add_column(name)
    for each in report.engines:
        table.add_row(
            each.engine + _ranges(each.layer_ends),
            str(each.copies),
            str(each.micro_batches),
            str(each.max_num_seqs),
            str(each.max_num_batched_tokens),
            milliseconds(each.ttft_s),
            milliseconds(each.tpot_s),
            f"{each.tokens_per_s:.0f}",
            f"{each.most_load:.3g}",
            f"{each.kl:.3g}",
            each.precision,
            each.binding,
        )
    return table


def _ranges(ends: Sequence[int]) -> str:
    """Return layer ranges for people: the layers of each device."""
    if not ends:
        return ""
    ranges = (f"{a}-{b - 1}" for a, b in zip((0, *ends), ends, strict=False))
    return f" (layers {', '.join(ranges)})"


def _front(report: Report) -> Table:
    table = Table("engine", "copies", "per hour", "TTFT", "TPOT", "tokens/s", "kl", title="Front")
    for each in report.front:
        table.add_row(
            each.engine,
            str(each.copies),
            f"{each.price_per_hour:.4g}",
            milliseconds(each.ttft_s),
            milliseconds(each.tpot_s),
            f"{each.tokens_per_s:.0f}",
            f"{each.kl:.3g}",
        )
    return table
