"""Each alert reads what is served, names its section of the runbook, and fires when it should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from deploy.observability.files import rules
from deploy.yaml_text import yaml_text
from tests.deploy.observability.scrape import ENGINE, OF_TARGETS, check, reads, scraped

ROOT = Path(__file__).parents[3]
PROMTOOL = os.environ.get("TOPSPIN_PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="Prometheus' promtool is not here")

Series = dict[str, str]


class Case(NamedTuple):
    """Samples of 60 minutes, one a minute, with which an alert fires, and others where it does not.

    In promtool's notation: `1+2x60` begins with 1 and grows by 2.
    """

    fires: Series
    quiet: Series


def first_tokens(in_time: str) -> Series:
    """Return requests of which `in_time` per minute, of 100, had their first token within 5 s."""
    name = "time_to_first_token_seconds_bucket"
    return {
        name + '{le="2.5"}': "0x60",
        name + '{le="5.0"}': f"0+{in_time}x60",
        name + '{le="10.0"}': "0+100x60",
        name + '{le="+Inf"}': "0+100x60",
    }


def answers(num_failed: str) -> Series:
    """Return 100 answers per minute by two routes, of which so many failed; probes fail as well."""
    name = "http_responses_total"
    return {
        name + '{endpoint="/v1/completions",code="200"}': "0+50x60",
        name + '{endpoint="/v1/chat/completions",code="200"}': "0+40x60",
        name + '{endpoint="/v1/completions",code="400"}': "0+10x60",
        name + '{endpoint="/v1/completions",code="503"}': f"0+{num_failed}x60",
        name + '{endpoint="/health",code="503"}': "0+100x60",
    }


def nodes(present: int, optional: int) -> Series:
    """Return two planned expert nodes of either kind, of which so many are there."""
    return {
        'nodes_planned{role="expert",optional="false"}': "2x60",
        'nodes_planned{role="expert",optional="true"}': "2x60",
        'nodes{role="expert",optional="false"}': f"{present}x60",
        'nodes{role="expert",optional="true"}': f"{optional}x60",
    }


NOTHING_IS_SCRAPED = "TopspinNoMetrics"
UP = {"engine_up": "1x60"}
QUEUE = {"max_queued_requests": "100x60"}
ENDED = {'request_success_total{finished_reason="stop"}': "0+10x60"}
CASES = {
    NOTHING_IS_SCRAPED: Case({}, UP),
    "TopspinEngineDown": Case({"engine_up": "0x60"}, UP),
    "TopspinRoleMissing": Case(
        UP | {'nodes{role="expert",optional="true"}': "0x60"},
        UP | {'nodes{role="expert",optional="true"}': "1x60"},
    ),
    "TopspinNodesMissing": Case(UP | nodes(1, 2), UP | nodes(2, 0)),
    "TopspinSlowNode": Case(UP | {'slow_nodes{role="expert",index="1"}': "3.5x60"}, UP),
    "TopspinReplays": Case(
        UP | {"num_replays_total": "0x54 3x6"}, UP | {"num_replays_total": "3x60"}
    ),
    "TopspinErrorAnswers": Case(UP | answers("10"), UP | answers("2")),
    "TopspinFailedChoices": Case(
        UP | ENDED | {'request_success_total{finished_reason="error"}': "0+1x60"},
        UP | ENDED | {'request_success_total{finished_reason="error"}': "0x60"},
    ),
    "TopspinQueueNearLimit": Case(
        UP | QUEUE | {"num_requests_waiting": "81x60"},
        UP | QUEUE | {"num_requests_waiting": "80x60"},
    ),
    "TopspinKvCacheNearlyFull": Case(
        UP | {"kv_cache_usage_perc": "0.97x60"},
        # Full for a while only.
        UP | {"kv_cache_usage_perc": "0.5x45 0.97x15"},
    ),
    "TopspinPreemptions": Case(
        UP | ENDED | {"num_preemptions_total": "0+11x60"},
        UP | ENDED | {"num_preemptions_total": "0+9x60"},
    ),
    "TopspinSlowFirstToken": Case(UP | first_tokens("94"), UP | first_tokens("96")),
    "TopspinExpertImbalance": Case(
        UP | {'expert_balance{table="current"}': "1.6x60"},
        UP
        | {'expert_balance{table="current"}': "1.4x60"}
        | {'expert_balance{table="previous"}': "1.6x60"},
    ),
}


def alerts() -> list[dict[str, Any]]:
    (group,) = rules()["groups"]
    return list(group["rules"])


def test_every_alert_reads_what_is_served() -> None:
    for alert in alerts():
        assert list(check(alert["expr"])), alert["alert"]


def test_every_alert_says_where_by_labels_that_it_has() -> None:
    for alert in alerts():
        _, grouped = reads(alert["expr"])
        has = grouped[0] if grouped else ENGINE | OF_TARGETS
        named = set(re.findall(r"\$labels\.(\w+)", " ".join(alert["annotations"].values())))
        assert named <= has, alert["alert"]


def test_every_alert_has_a_section_of_the_runbook_and_says_how_bad_it_is() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    sections = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"(?m)^## (.*)$", text)
    }
    named = set()
    for alert in alerts():
        (section,) = re.findall(r"docs/runbook\.md#(\S+)$", alert["annotations"]["description"])
        assert alert["alert"] in text
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert re.fullmatch(r"\d+m", alert["for"])
        named.add(section)
    assert named == sections
    assert len({alert["alert"] for alert in alerts()}) == len(alerts())


def test_the_runbook_names_only_what_is_served() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    served = {*scraped(), *(sample.family for sample in scraped().values())}
    named = set(re.findall(r"`(topspin_\w+)[`{]", text))
    assert named
    assert named <= served


def test_every_alert_is_tried() -> None:
    assert {alert["alert"] for alert in alerts()} == set(CASES)


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """Every case is an engine of its own, with two gateways; all are watched at once."""
    engines: dict[str, Series] = {}
    expected = []
    for alert in alerts():
        name = alert["alert"]
        early = f"{int(alert['for'].removesuffix('m')) - 1}m"
        if name != NOTHING_IS_SCRAPED:
            engines |= {name: CASES[name].fires, f"not {name}": CASES[name].quiet}
            expected += [firing(name, early, []), firing(name, "60m", [name])]
            expected += [firing(f"not {name}", at, []) for at in ("30m", "60m")]
    none = [firing("", "4m", []), firing("", "60m", [NOTHING_IS_SCRAPED])]
    promtool(
        tmp_path, {"promql_expr_test": none}, watched(engines) | {"promql_expr_test": expected}
    )


def firing(engine: str, at: str, names: list[str]) -> dict[str, Any]:
    """Return what promtool should find firing of an engine."""
    alert = f'ALERTS{{alertstate="firing",job="{engine}"}}'
    return {
        "expr": f"count by (alertname) (sum without (instance) ({alert}))",
        "eval_time": at,
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in names],
    }


def watched(engines: dict[str, Series]) -> dict[str, Any]:
    """Return the samples of engines, each as scraped from its two gateways, for promtool."""
    return {
        "input_series": [
            {"series": served_by(metric, engine, gateway), "values": values}
            for engine, series in engines.items()
            for metric, values in series.items()
            for gateway in ("a:8000", "b:8000")
        ]
    }


def served_by(metric: str, engine: str, gateway: str) -> str:
    """Return a series with the labels that a scrape gives it."""
    name, _, labels = metric.partition("{")
    common = f'model_name="m",namespace="n",job="{engine}",instance="{gateway}"'
    return f"topspin_{name}{{{common},{labels or '}'}"


def promtool(folder: Path, *tests: dict[str, Any]) -> None:
    """Check the rules, and run tests of them."""
    assert PROMTOOL is not None
    (folder / "rules.yaml").write_text(yaml_text(rules()))
    content = {"rule_files": ["rules.yaml"], "tests": [{"interval": "1m", **t} for t in tests]}
    (folder / "tests.yaml").write_text(yaml.safe_dump(content))
    for command in ("check", "test"):
        file = "rules.yaml" if command == "check" else "tests.yaml"
        done = subprocess.run(
            [PROMTOOL, command, "rules", file], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
