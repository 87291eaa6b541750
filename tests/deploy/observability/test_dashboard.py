"""The dashboard shows every metric, each query is of what is served, and panels do not overlap."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest

from deploy.observability.files import dashboard
from tests.deploy.observability.scrape import check, scraped

# Prefill and decode, which are shown, together.
NOT_SHOWN = {"topspin_request_inference_time_seconds"}


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dashboard())
    return found


def expressions(*panels: dict[str, Any]) -> list[str]:
    """Return the queries; Grafana's other variables are inside of PromQL's strings."""
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [each.replace("$__rate_interval", "5m") for each in found]


def test_every_served_metric_is_shown_or_left_out_on_purpose(shown: dict[str, Any]) -> None:
    read = {each.family for text in expressions(*shown["panels"]) for each in check(text)}
    served = {sample.family for sample in scraped().values()}
    assert served - read == NOT_SHOWN


def test_every_query_and_variable_follows_the_choices(shown: dict[str, Any]) -> None:
    variables = {each["name"]: each for each in shown["templating"]["list"]}
    labels = set(variables) - {"datasource"}
    for expression in expressions(*shown["panels"]):
        assert set(re.findall(r"\$(\w+)", expression)) == labels
    for label in labels:
        variable = variables[label]
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
        assert asked is not None
        assert asked[2] == label
        assert [each.family for each in check(asked[1])] == ["topspin_engine_up"]
        assert variable["query"]["query"] == variable["definition"]
        assert variable["includeAll"]
    sources = [each["datasource"]["uid"] for each in shown["panels"] if each["type"] != "row"]
    assert set(sources) == {"${datasource}"}


def test_panels_have_numbers_of_their_own_and_do_not_overlap(shown: dict[str, Any]) -> None:
    panels = shown["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(refs)) == len(refs)
    places = [panel["gridPos"] for panel in panels]
    assert all(each["x"] >= 0 and each["x"] + each["w"] <= 24 for each in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_panels_are_described_by_their_metrics_own_texts(shown: dict[str, Any]) -> None:
    for panel in shown["panels"]:
        if panel["type"] != "row":
            read = (each for text in expressions(panel) for each in check(text))
            texts = {each.family: each.text for each in read}
            own = (f"`{family}`: {text}" for family, text in texts.items())
            assert panel["description"] == "\n\n".join(own)


def test_parts_of_a_whole_are_stacked(shown: dict[str, Any]) -> None:
    (panel,) = [
        each
        for each in shown["panels"]
        if each["type"] != "row" and "stacking" in each["fieldConfig"]["defaults"]["custom"]
    ]
    read = [each.family for expression in expressions(panel) for each in check(expression)]
    # Not `expert`, which is part of the time that attention nodes wait, nor `link`.
    own = [f"topspin_step_{part}_seconds" for part in ("prepare", "draft", "attention")]
    own += ["topspin_step_wait_seconds", "topspin_step_sample_seconds"]
    assert read == [*own, "topspin_scheduler_gap_seconds"]
