"""Queries are of what is served, as its type asks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deploy.observability.catalogue import Catalogue, Query, read_families
from tests.deploy.observability.scrape import scraped


@pytest.fixture(scope="module")
def of() -> Catalogue:
    return Catalogue(read_families(), selector='job="j"', window="5m")


def test_the_families_are_those_of_a_scrape() -> None:
    served = {
        (each.family.removeprefix("topspin_"), each.type, each.labels - {"le"})
        for each in scraped().values()
    }
    assert {(f.name, f.type, f.labels) for f in read_families().values()} == served


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda of: of.value("num_requests_walking"), "has no topspin_num_requests_walking"),
        (lambda of: of.value("engine_steps"), "is a counter, not a gauge"),
        (lambda of: of.rate("num_requests_waiting"), "is a gauge, not a counter"),
        (lambda of: of.increase("num_requests_waiting", "5m"), "is a gauge, not a counter"),
        (lambda of: of.quantile(0.5, "kv_retrieval_recall"), "is a summary, not a histogram"),
        (lambda of: of.mean("engine_steps"), "is a counter, not a histogram or summary"),
        (lambda of: of.spent("engine_steps"), "is a counter, not a histogram or summary"),
        (lambda of: of.each("engine_steps"), "is a counter, not a gauge"),
        (lambda of: of.value("nodes", "rule"), "has no label rule"),
        (lambda of: of.value("nodes", where={"rule": '="expert"'}), "has no label rule"),
        (lambda of: of.rate("http_responses", where={"status": '="500"'}), "no label status"),
        (lambda of: of.difference("nodes", "local_layers", "role", where={}), "no label role"),
    ],
)
def test_what_is_not_served_is_refused(
    of: Catalogue, ask: Callable[[Catalogue], Query], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        ask(of)


def test_gateways_are_added_up_and_their_engine_is_counted_once(of: Catalogue) -> None:
    by = "by (namespace, job, model_name)"
    assert of.rate("prompt_tokens").text == (
        f'sum {by} (rate(topspin_prompt_tokens_total{{job="j"}}[5m]))'
    )
    assert of.value("num_requests_running").text == (
        f'max {by} (topspin_num_requests_running{{job="j"}})'
    )
    recall = of.mean("kv_retrieval_recall")
    assert recall.text == (
        f'max {by} (rate(topspin_kv_retrieval_recall_sum{{job="j"}}[5m])) / '
        f'max {by} (rate(topspin_kv_retrieval_recall_count{{job="j"}}[5m]))'
    )
    assert {family.name for family in recall.families} == {"kv_retrieval_recall"}
