"""The metrics that /metrics has, and queries (PromQL) of them.

Owns the rule that a query names only metrics and labels that are served, and reads each as its type
asks. The families are those of a scrape of the gateway's own code: there is no second list of them.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, Final, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from server.gateway.operations.metrics import MODEL_LABEL, EngineCollector, GatewayMetrics
from server.scheduler.planning.counters import Counters
from topspin.messages import NodeCount, Stats

PREFIX: Final = "topspin_"
ENGINE: Final = ("namespace", "job", MODEL_LABEL)
"""The labels that tell engines apart; the first two are the scrape's."""
OF_TARGETS: Final = frozenset({"namespace", "job", "instance"})
"""Labels that Prometheus adds to what it scrapes."""


class Family(NamedTuple):
    """A metric without its prefix and suffix. `of_engine`: every gateway shows the engine's.

    `greatest`: the last bound of a histogram's buckets that is finite; quantiles are at most that.
    """

    name: str
    type: str
    text: str
    labels: frozenset[str]
    of_engine: bool
    greatest: float | None


class Query(NamedTuple):
    """An expression, and the families that it reads."""

    text: str
    families: tuple[Family, ...]

    def __truediv__(self, other: Query) -> Query:
        return Query(f"{self.text} / {other.text}", self.families + other.families)


def read_families() -> dict[str, Family]:
    """Return every family of a scrape, by its name without prefix and suffix."""
    stats = _stats_with_everything()
    gateway = GatewayMetrics("model")
    gateway.observe_answer("/", 200)
    engine = EngineCollector("model")
    engine.stats = stats
    of_engine = {family.name for family in engine.collect()}
    families = {}
    for each in text_string_to_metric_families(gateway.render(stats).decode()):
        if not each.name.endswith("_created"):
            labels = frozenset(label for sample in each.samples for label in sample.labels)
            bounds = [float(sample.labels.get("le", "inf")) for sample in each.samples]
            families[each.name.removeprefix(PREFIX)] = Family(
                name=each.name.removeprefix(PREFIX),
                type=each.type,
                text=each.documentation,
                labels=labels - {"le"},
                of_engine=each.name in of_engine,
                greatest=max(filter(isfinite, bounds), default=None),
            )
    return families


def _stats_with_everything() -> Stats:
    """Return counters that have a sample of every metric."""
    fields = msgspec.structs.fields(Stats)
    zeros: dict[str, Any] = {field.encode_name: 0 for field in fields if field.required}
    return Stats(
        **zeros,
        nodes=(NodeCount(role="expert", optional=False, planned=1, present=1),),
        num_accepted_tokens=(0,),
        expert_tokens=((0,),),
        step_phases=Counters().step_phases(),
    )


class Catalogue:
    """Queries of the served metrics; each raises ValueError for what is not served so.

    All samples are chosen by `selector` (PromQL's matchers), rates are over `window`. Samples are
    put together by engine and `by`: the gateways' own are added up. Of the engine's, which each of
    its gateways shows, the greatest is taken: of several engines of one scrape job that is the
    worst. `where` has, by label, PromQL's operator and quoted value.
    """

    def __init__(self, families: Mapping[str, Family], *, selector: str, window: str) -> None:
        self.families = families
        self._selector = selector
        self._window = window

    def value(
        self, name: str, *by: str, where: Mapping[str, str] | None = None, of: str = "{}"
    ) -> Query:
        """Return the value of a gauge, or a function `of` it, whose {} is the gauge."""
        family = self._family(name, ("gauge",), (*by, *(where or ())))
        return self._together(family, of.format(self._samples(family, "", where)), by)

    def rate(self, name: str, *by: str, where: Mapping[str, str] | None = None) -> Query:
        """Return the increase per second of a counter."""
        family = self._family(name, ("counter",), (*by, *(where or ())))
        return self._together(family, self._rate(family, "_total", where), by)

    def increase(self, name: str, window: str) -> Query:
        """Return the increase of a counter over `window`."""
        family = self._family(name, ("counter",), ())
        return self._together(family, f"increase({self._samples(family, '_total')}[{window}])", ())

    def quantile(self, share: float, name: str) -> Query:
        """Return a histogram's quantile, `share` from 0 to 1."""
        family = self._family(name, ("histogram",), ())
        buckets = self._together(family, self._rate(family, "_bucket"), ("le",))
        return Query(f"histogram_quantile({share:g}, {buckets.text})", (family,))

    def mean(self, name: str) -> Query:
        """Return the mean of a histogram's or summary's observations."""
        family = self._family(name, ("histogram", "summary"), ())
        return self.spent(name) / self._together(family, self._rate(family, "_count"), ())

    def spent(self, name: str) -> Query:
        """Return by how much a histogram's or summary's sum grows per second."""
        family = self._family(name, ("histogram", "summary"), ())
        return self._together(family, self._rate(family, "_sum"), ())

    def difference(self, name: str, other: str, *by: str, where: Mapping[str, str]) -> Query:
        """Return by how much one gauge is greater than another with the same labels."""
        families = [self._family(each, ("gauge",), (*by, *where)) for each in (name, other)]
        first, second = (self._samples(family, "", where) for family in families)
        text = self._together(families[0], f"{first} - {second}", by).text
        return Query(text, tuple(families))

    def each(self, name: str) -> Query:
        """Return a gauge as every gateway shows it."""
        family = self._family(name, ("gauge",), ())
        return Query(self._samples(family, ""), (family,))

    def _family(self, name: str, types: Iterable[str], labels: Iterable[str]) -> Family:
        family = self.families.get(name)
        if family is None:
            raise ValueError(f"/metrics has no {PREFIX}{name}")
        if family.type not in types:
            raise ValueError(f"{PREFIX}{name} is a {family.type}, not a {' or '.join(types)}")
        for label in labels:
            if label not in family.labels | OF_TARGETS:
                raise ValueError(f"{PREFIX}{name} has no label {label}")
        return family

    def _samples(self, family: Family, suffix: str, where: Mapping[str, str] | None = None) -> str:
        chosen = [self._selector, *(f"{label}{test}" for label, test in (where or {}).items())]
        matchers = ",".join(filter(None, chosen))
        return f"{PREFIX}{family.name}{suffix}" + (f"{{{matchers}}}" if matchers else "")

    def _rate(self, family: Family, suffix: str, where: Mapping[str, str] | None = None) -> str:
        return f"rate({self._samples(family, suffix, where)}[{self._window}])"

    def _together(self, family: Family, text: str, by: Iterable[str]) -> Query:
        """Return the samples of `text`, one for each engine and `by`."""
        way = "max" if family.of_engine else "sum"
        return Query(f"{way} by ({', '.join((*ENGINE, *by))}) ({text})", (family,))
