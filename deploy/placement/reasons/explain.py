"""The report of a search: the plan's figures, the front, what lost and why, what would change it.

Owns the words. Every number comes from rated engines; what would change the outcome is found by
searching again with one thing changed. Called by deploy.placement.command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from deploy.placement.cost import unmeasured
from deploy.placement.reasons import changes
from deploy.placement.report import EngineReport, FrontPoint, PlanChange, PlanReport, Rejected
from deploy.placement.search.drafts import Decision
from deploy.placement.search.layouts import (
    most_copies,
    price_of,
)
from deploy.placement.search.rating import Rating, milliseconds
from deploy.placement.search.search import (
    FleetMember,
    Inputs,
    Result,
    copies_needed,
    search,
    worth,
)
from deploy.placement.workload import answer_s, asked_load
from deploy.placement.write import local_experts_of

SEARCHED_AGAIN = 12
"""Engines that are searched again for that, beside the best of every kind."""
BEST_SHOWN = 40
"""Engines that are asked for their figures at the workload's load."""


class Offer(NamedTuple):
    """As many copies of one engine as carry the load, and their figures at that load."""

    rating: Rating
    figures: FrontPoint


def explain(
    inputs: Inputs,
    result: Result,
    drafts: Sequence[Decision] = (),
    told: Callable[[int], None] | None = None,
) -> PlanReport:
    """Return the report of a search; `told` as in search(), of those that are made here."""
    found = _Explainer(inputs, result, told)
    return PlanReport(
        objective=inputs.workload.objective,
        load_unit=found.load_unit,
        price_per_hour=result.price + sum(each.price for each in drafts),
        load=found.asked,
        most_load=result.load,
        is_exact=result.is_exact,
        engines=tuple(map(found.engine, result.members)),
        front=tuple(_front_of([offer.figures for offer in found.offers])),
        runner_up=found.runner_up(),
        losers=tuple(found.rejected()),
        answers=tuple(found.answers()),
        flips=tuple(found.what_ifs()),
        estimates=tuple(_estimates(inputs, result.members)),
        refusal="" if result.members else found.refusal(),
        drafts=tuple(
            f"{member.rating.layout}: {each.text}"
            for member, each in zip(result.members, drafts, strict=False)
        ),
    )


class _Explainer:
    """The answers to questions about one result.

    `best`: of each kind of engine the best one there is, whether it meets the targets or not.
    """

    def __init__(
        self, inputs: Inputs, result: Result, told: Callable[[int], None] | None = None
    ) -> None:
        self.inputs, self.result, self._told = inputs, result, told
        self.workload = inputs.workload
        self.rater = inputs.rater()
        self.asked = asked_load(inputs.workload)
        self.load_unit = "requests/s" if inputs.workload.users is None else "users"
        self.ranked = sorted(result.ratings, key=self._merit, reverse=True)
        self.best: dict[str, Rating] = {}
        for rating in self.ranked:
            self.best.setdefault(rating.layout.family, rating)
        self.offers = list(self._offers())

    def _merit(self, rating: Rating) -> tuple[float, float]:
        """Return load per price, or by how little it fails."""
        if rating.point is None:
            return 0.0, -rating.binding.needs / max(rating.binding.has, 1e-9)
        return worth(rating, self.workload), 0.0

    def _offers(self) -> Iterator[Offer]:
        """Yield engines that carry the load in copies, the cheapest first.

        The best of every kind, and of the rest the first ones.
        """
        sized: list[tuple[float, Rating, int]] = []
        for rating in self.result.ratings:
            copies = copies_needed(rating, self.workload, self.workload.max_price_per_hour)
            if copies:
                sized.append((price_of(rating.layout, copies), rating, copies))
        sized.sort(key=lambda each: (each[0], -each[1].load(self.workload) * each[2]))
        seen: set[str] = set()
        num_others = 0
        for price, rating, copies in sized:
            kind = rating.layout.family
            if kind in seen and num_others == BEST_SHOWN:
                continue
            num_others += kind in seen
            seen.add(kind)
            _, most = rating.settled
            figures = self._figures(self.rater.at_load(rating, self.asked / copies), copies)
            figures["tokens_per_s"] = copies * most.rate * self.workload.output.average
            yield Offer(rating, msgspec.convert(figures | {"price_per_hour": price}, FrontPoint))

    def _figures(self, rating: Rating, copies: int) -> dict[str, object]:
        """Return the fields of EngineFigures."""
        _, found = rating.settled
        return {
            "engine": str(rating.layout),
            "copies": copies,
            "precision": str(rating.formats),
            "ttft_s": found.ttft_s,
            "tpot_s": found.tpot_s,
            "tokens_per_s": found.rate * self.workload.output.average,
            "kl": rating.formats.kl,
        }

    def engine(self, member: FleetMember) -> EngineReport:
        """Return the figures and settings of an engine of the fleet."""
        rating, (engine, found) = member.rating, member.rating.settled
        layout, tokens = rating.layout, found.rate * self.workload.output.average
        spans = " + ".join(map(str, layout.spans))
        fields = self._figures(rating, member.copies) | {
            "hosts": spans or layout.host.spec.name,
            "num_attention": layout.num_attention,
            "num_experts": layout.num_experts,
            "devices": " + ".join(
                dict.fromkeys(slot.device.name for slot, _ in (*layout.holders, *layout.experts))
            ),
            "price_per_million": price_of(layout, member.copies)
            / (member.copies * tokens * 3600e-6),
            "micro_batches": engine.micro_batches,
            "max_num_seqs": rating.max_num_seqs,
            "max_num_batched_tokens": engine.batched_tokens,
            "experts_per_node": engine.held,
            "layer_ends": engine.ends,
            "load": rating.load(self.workload),
            "most_load": rating.most_load,
            "binding": rating.binding.text,
        }
        local = local_experts_of(self.rater, rating)
        if local is not None:
            fields |= {
                "local_layers": len(local.experts.layers),
                "local_when": local.experts.when,
                "local_reason": local.reason,
            }
        return msgspec.convert(fields, EngineReport)

    def rejected(self) -> Iterator[Rejected]:
        """Yield for every kind that the fleet does not have why its best engine lost."""
        taken = {member.rating.layout.family for member in self.result.members}
        offered: dict[str, Offer] = {}
        for offer in self.offers:
            offered.setdefault(offer.rating.layout.family, offer)
        order = dict.fromkeys(rating.layout.family for rating in self.result.ratings)
        for kind in order:
            if kind in taken:
                continue
            rating, reason = self.best[kind], self.best[kind].binding.text
            if kind in offered:
                rating, reason = offered[kind].rating, self._worse(offered[kind])
            elif rating.point is not None:
                most = most_copies(rating.layout, self.workload.max_price_per_hour)
                carried = f"{most * rating.load(self.workload):.3g} {self.load_unit}"
                reason = f"carries {carried} of {self.asked:.3g}: {reason}"
            yield Rejected(kind=kind, engine=str(rating.layout), reason=reason)

    def runner_up(self) -> Rejected | None:
        """Return the best engine that the fleet does not have, or that fails by least, and why."""
        taken = {str(member.rating.layout) for member in self.result.members}
        offers = [each for each in self.offers if str(each.rating.layout) not in taken]
        if offers:
            best = min(offers, key=lambda each: self._order(each.figures))
            rating, reason = best.rating, self._worse(best)
        else:
            others = (each for each in self.ranked if str(each.layout) not in taken)
            found = next(others, None)
            if found is None or not taken:
                return None
            rating, reason = found, found.binding.text
        return Rejected(kind=rating.layout.family, engine=str(rating.layout), reason=reason)

    def _worse(self, offer: Offer) -> str:
        """Return in what an offer is worse than the fleet."""
        rating, figures = offer.rating, offer.figures
        if self.workload.objective == "min_latency":
            if not self.result.members:
                return rating.binding.text
            _, best = self.result.members[0].rating.settled
            own_s = answer_s(self.workload, figures.ttft_s, figures.tpot_s)
            best_s = answer_s(self.workload, best.ttft_s, best.tpot_s)
            return (
                f"an answer takes {milliseconds(own_s)} against {milliseconds(best_s)} (TPOT "
                f"{milliseconds(figures.tpot_s)} against {milliseconds(best.tpot_s)})"
            )
        load = rating.load(self.workload)
        carries = f"an engine carries {load:.3g} {self.load_unit} ({rating.binding.text})"
        if self.workload.objective == "max_throughput":
            return f"{carries}, {self._per_price(rating):.3g} per price"
        prices = f"{figures.price_per_hour:.4g} per hour against {self.result.price:.4g}"
        return f"{prices}: {carries}"

    def _per_price(self, rating: Rating) -> float:
        return rating.load(self.workload) / (rating.layout.price_per_hour or 1.0)

    def answers(self) -> Iterator[str]:
        """Yield whether to disaggregate and whether to quantise, and why."""
        if self.result.members and self.inputs.model.num_experts:
            yield self._disaggregation()
        if self.result.members:
            yield self._quantisation()

    def _disaggregation(self) -> str:
        is_apart = self.result.members[0].rating.layout.kind == "apart"
        verdict = "Disaggregate" if is_apart else "Do not disaggregate"

        def is_other(rating: Rating) -> bool:
            return (rating.layout.kind == "apart") != is_apart

        others = [each for each in self.offers if is_other(each.rating)]
        if others:
            other = min(others, key=lambda each: self._order(each.figures))
            return f"{verdict}: the best other way, {other.rating.layout}: {self._worse(other)}."
        best = next(filter(is_other, self.ranked), None)
        why = "there is none on these hosts"
        if best is not None:
            why = f"{best.layout}: {best.binding.text}"
        none = "nothing else" if is_apart else "no engine with both roles apart"
        return f"{verdict}: {none} meets the targets ({why})."

    def _order(self, figures: FrontPoint) -> tuple[float, ...]:
        """Return what is less for a better offer, by the objective."""
        if self.workload.objective == "min_latency":
            return (answer_s(self.workload, figures.ttft_s, figures.tpot_s),)
        if self.workload.objective == "max_throughput":
            return (-figures.tokens_per_s / (figures.price_per_hour or 1.0),)
        return (figures.price_per_hour, -figures.tokens_per_s)

    def _quantisation(self) -> str:
        chosen, max_kl, result = self.result.members[0].rating, self.workload.max_kl, self.result
        if not max_kl:
            return "Weights stay as stored: the workload allows no divergence (max_kl)."
        if self.inputs.sensitivity is None:
            return (
                "Weights stay as stored: without --sensitivity nothing says what quantisation "
                "costs."
            )
        idx = next(i for i, each in enumerate(result.ratings) if each.layout is chosen.layout)
        plain, quantised = result.plain[idx], result.quantised[idx]

        def load(rating: Rating) -> str:
            return f"{rating.load(self.workload):.3g}"

        if chosen.formats.key == plain.formats.key:
            if quantised is None:
                return "Do not quantise: no format is within max_kl on these devices."
            return (
                f"Do not quantise: {quantised.formats} carries {load(quantised)} {self.load_unit} "
                f"where stored weights carry {load(plain)}."
            )
        told = f"carry {load(plain)}" if plain.point else f"fail ({plain.binding.text})"
        return (
            f"Quantise ({chosen.formats}; divergence {chosen.formats.kl:.3g} of at most "
            f"{max_kl:.3g}): it carries {load(result.ratings[idx])} {self.load_unit} per engine, "
            f"stored weights {told}."
        )

    def refusal(self) -> str:
        """Return why no fleet was found: the best there is, and what binds."""
        if not self.ranked:
            return "no engine can be made of these hosts: no link joins their devices"
        workload, unit = self.workload, self.load_unit
        working = [each for each in self.ranked if each.point is not None]
        best = (working or self.ranked)[0]
        binds = f"{best.layout}: {best.binding.text}"
        if not working:
            needs, has = best.binding.needs, best.binding.has
            over = f" ({needs / has - 1:.1%} too much)" if has > 0 and needs > has else ""
            return f"no engine of these hosts meets the targets. The nearest is {binds}{over}"
        if workload.max_price_per_hour is not None:
            unlimited = msgspec.structs.replace(workload, max_price_per_hour=None)
            dearer = search(dataclasses.replace(self.inputs, workload=unlimited), self._told)
            if dearer.members:
                return (
                    f"{self.asked:.4g} {unit} cost {dearer.price:.4g} per hour at least, of which "
                    f"max_price_per_hour allows {workload.max_price_per_hour:.4g}"
                )
        carried = self.result.load
        return (
            f"all hosts together carry {carried:.4g} {unit} within the targets, of "
            f"{self.asked:.4g} ({carried / self.asked:.1%}); what binds in the best engine, {binds}"
        )

    def what_ifs(self) -> Iterator[PlanChange]:
        """Yield changes of one thing that would change the outcome, by searching again."""
        kept = [*self.ranked[:SEARCHED_AGAIN], *self.best.values()]
        kept += [member.rating for member in self.result.members]
        names = frozenset(str(each.layout) for each in kept)
        for knob in self._knobs(dataclasses.replace(self.inputs, only=names)):
            found = changes.smallest(
                knob, lambda changed: self._difference(search(changed, self._told))
            )
            if found is not None:
                yield found

    def _knobs(self, inputs: Inputs) -> Iterator[changes.Knob]:
        """Yield what binds first, and the links; without a plan all that may help."""
        targets, members = self.workload.targets, self.result.members
        limit = members[0].rating.binding.limit if members else None
        if limit in (None, "memory"):
            yield changes.memory(inputs)
        if targets.tpot_s is not None and limit in (None, "tpot", "prefill", "sequences"):
            yield changes.target(inputs, "tpot_s")
        if targets.ttft_s is not None and limit in (None, "ttft", "prefill"):
            yield changes.target(inputs, "ttft_s")
        if inputs.model.num_experts:
            yield changes.links(inputs)
            if inputs.between_hosts is not None:
                yield changes.between_hosts(inputs)
        if not members:
            # Other numbers of hosts make other engines over hosts.
            kinds = frozenset(each.layout.family for each in self.ranked if each.layout.spans)
            yield from changes.more_hosts(
                dataclasses.replace(inputs, only=(inputs.only or frozenset()) | kinds)
            )
            yield from changes.four_bits(inputs)

    def _difference(self, after: Result) -> str:
        """Return what is better or other after a change; empty: nothing."""
        before, objective = self.result, self.workload.objective
        if not after.members:
            return ""
        layout = after.members[0].rating.layout
        if not before.members:
            return f"{after.members[0].copies} x {layout} would do, at {after.price:.4g} per hour"
        if (before.members[0].rating.layout.kind == "apart") != (layout.kind == "apart"):
            return f"the answer would be {layout}"
        if objective == "min_price" and after.price < 0.99 * before.price:
            prices = f"{after.price:.4g} instead of {before.price:.4g}"
            return f"the price would be {prices}, with {layout}"
        if objective == "max_throughput" and after.load > 1.05 * before.load:
            loads = f"{after.load:.4g} {self.load_unit} instead of {before.load:.4g}"
            return f"{loads}, with {layout}"
        (_, old), (_, new) = (each.members[0].rating.settled for each in (before, after))
        if objective == "min_latency" and new.tpot_s < 0.95 * old.tpot_s:
            return f"TPOT {milliseconds(new.tpot_s)} instead of {milliseconds(old.tpot_s)}"
        return ""


def _front_of(offers: Sequence[FrontPoint]) -> list[FrontPoint]:
    """Return the offers that no other equals or beats in all of price, times, tokens and kl."""

    def costs(offer: FrontPoint) -> tuple[float, ...]:
        return (offer.price_per_hour, offer.ttft_s, offer.tpot_s, -offer.tokens_per_s, offer.kl)

    front: dict[tuple[float, ...], FrontPoint] = {}
    every = {costs(offer) for offer in offers}
    for offer in offers:
        own = costs(offer)
        others = every - {own}
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other in others):
            front.setdefault(own, offer)
    return list(front.values())


def _estimates(inputs: Inputs, members: Sequence[FleetMember]) -> list[str]:
    """Return, by device, what no table of its profile answers for."""
    found: dict[str, set[str]] = {}
    for member in members:
        engine, _ = member.rating.settled
        slots = [("attention", slot) for slot, _ in engine.layout.attention]
        slots += [("stage", slot) for slot in engine.layout.stages]
        slots += [("expert", slot) for slot, _ in engine.layout.experts]
        if engine.num_local:
            slots += [("expert", slot) for slot, _ in engine.layout.attention]
        for role, slot in slots:
            profile = slot.device.profile
            missing = unmeasured(
                profile, inputs.model, engine.formats.of, role=role, threads=max(1, slot.threads)
            )
            found.setdefault(f"{profile.name} ({profile.source})", set()).update(missing)
    return [f"{name}: {', '.join(sorted(each))}" for name, each in found.items() if each]
