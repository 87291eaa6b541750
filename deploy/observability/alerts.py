"""Prometheus' alert rules for an engine.

Owns the conditions, how long each must hold, and which section of the runbook says what to do.
Pure: returns the tree of a rule file, or of the Prometheus Operator's PrometheusRule.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from deploy.observability.catalogue import Catalogue, Query, read_families
from topspin.errors import ConfigError

RUNBOOK: Final = "docs/runbook.md"
TTFT_P95_S: Final = 5.0
"""The default of the only limit that is a matter of the service and not of the engine."""

WINDOW: Final = "5m"
QUEUE_SHARE: Final = 0.8
KV_SHARE: Final = 0.95
ERROR_SHARE: Final = 0.05
PREEMPTIONS_PER_CHOICE: Final = 0.5
IMBALANCE: Final = 1.5

Object = dict[str, Any]
Severity = Literal["critical", "warning"]


class Alert(NamedTuple):
    """One rule. `section` is the runbook's, as an anchor; the texts are Prometheus' templates."""

    name: str
    condition: str
    holds_for: str
    severity: Severity
    section: str
    summary: str
    description: str


def rules(ttft_p95_s: float = TTFT_P95_S) -> Object:
    """Return a rule file. `ttft_p95_s`: seconds to the first token that 95 % should not exceed.

    Raises ConfigError if the metric cannot tell that they do.
    """
    alerts = [*_availability(), *_load(ttft_p95_s), *_shape()]
    return {"groups": [{"name": "topspin", "rules": [_rule(alert) for alert in alerts]}]}


def prometheus_rule(name: str, ttft_p95_s: float = TTFT_P95_S) -> Object:
    """Return the same for the Prometheus Operator, as an object called `name`."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": name}},
        "spec": rules(ttft_p95_s),
    }


def _rule(alert: Alert) -> Object:
    return {
        "alert": alert.name,
        "expr": alert.condition,
        "for": alert.holds_for,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": f"{alert.description} What to do: {RUNBOOK}#{alert.section}",
        },
    }


_ENGINE: Final = "{{ $labels.model_name }} ({{ $labels.job }})"
_SHARE: Final = "{{ $value | humanizePercentage }}"


def _catalogue() -> Catalogue:
    return Catalogue(read_families(), selector="", window=WINDOW)


def _availability() -> list[Alert]:
    of = _catalogue()
    up = of.each("engine_up").text
    there = of.value("nodes", "role", "optional").text
    engine_and_role = "namespace, job, model_name, role"
    return [
        Alert(
            "TopspinNoMetrics",
            f"absent({up})",
            "5m",
            "critical",
            "no-metrics",
            "No gateway of any engine is scraped",
            "Prometheus has no topspin metrics at all.",
        ),
        Alert(
            "TopspinEngineDown",
            f"{up} == 0",
            "1m",
            "critical",
            "the-engine-does-not-answer",
            f"The engine of {_ENGINE} does not answer",
            "The gateway {{ $labels.instance }} gets no answer of its scheduler; its clients get "
            "503.",
        ),
        Alert(
            "TopspinRoleMissing",
            f"sum by ({engine_and_role}) ({there}) == 0",
            "1m",
            "critical",
            "nodes-are-missing",
            f"{_ENGINE} has no {{{{ $labels.role }}}} node",
            "The plan has nodes of this role and none is there.",
        ),
        Alert(
            "TopspinNodesMissing",
            of.difference("nodes_planned", "nodes", "role", where={"optional": '="false"'}).text
            + " > 0",
            "5m",
            "warning",
            "nodes-are-missing",
            f"{_ENGINE} lacks {{{{ $value }}}} {{{{ $labels.role }}}} nodes",
            "Nodes that are not optional are missing; the others do their work, if they can.",
        ),
        Alert(
            "TopspinReplays",
            of.increase("num_replays", "10m").text + " > 0",
            "1m",
            "warning",
            "requests-are-replayed",
            f"{_ENGINE} has replayed requests",
            "A node or a step was lost, or an optional node came or went: streams paused, and "
            "about {{ $value | humanize }} requests were computed again.",
        ),
        Alert(
            "TopspinErrorAnswers",
            _share(
                of.rate("http_responses", where={"endpoint": '=~"/v1/.*"', "code": '=~"5.."'}),
                of.rate("http_responses", where={"endpoint": '=~"/v1/.*"'}),
            ),
            "5m",
            "critical",
            "many-errors",
            f"{_SHARE} of the answers of {_ENGINE} are server errors",
            "Clients of /v1 get statuses from 500 on; 503 is an engine that does not serve.",
        ),
        Alert(
            "TopspinFailedChoices",
            _share(
                of.rate("request_success", where={"finished_reason": '="error"'}),
                of.rate("request_success"),
            ),
            "5m",
            "critical",
            "many-errors",
            f"{_SHARE} of the choices of {_ENGINE} fail",
            "Requests that the engine had taken ended by an error, streams after their start too.",
        ),
    ]


def _share(part: Query, whole: Query) -> str:
    return f"{(part / whole).text} > {ERROR_SHARE:g}"


def _load(ttft_p95_s: float) -> list[Alert]:
    of = _catalogue()
    ttft = of.quantile(0.95, "time_to_first_token_seconds")
    most_s = ttft.families[0].greatest
    assert most_s is not None
    if not 0 < ttft_p95_s < most_s:
        raise ConfigError(
            f"a p95 of {ttft_p95_s:g} s to the first token: must be above 0, and below {most_s:g}, "
            "the metric's greatest bucket"
        )
    waiting, limit = of.value("num_requests_waiting"), of.value("max_queued_requests")
    ended = of.rate("request_success")
    return [
        Alert(
            "TopspinQueueNearLimit",
            f"{waiting.text} > {QUEUE_SHARE:g} * {limit.text}",
            "5m",
            "warning",
            "the-queue-is-long",
            f"{{{{ $value }}}} requests wait for {_ENGINE}",
            f"More than {QUEUE_SHARE:.0%} of the queue is taken; beyond its limit clients get 429.",
        ),
        Alert(
            "TopspinKvCacheNearlyFull",
            f"{of.value('kv_cache_usage_perc').text} > {KV_SHARE:g}",
            "15m",
            "warning",
            "the-kv-cache-is-full",
            f"{_SHARE} of the KV blocks of {_ENGINE} are in use",
            "New requests wait for blocks, and running ones may be preempted.",
        ),
        Alert(
            "TopspinPreemptions",
            f"{(of.rate('num_preemptions') / ended).text} > {PREEMPTIONS_PER_CHOICE:g}",
            "10m",
            "warning",
            "many-preemptions",
            f"{_ENGINE} preempts {{{{ $value | humanize }}}} times per choice that ends",
            "What a preempted request had in the KV cache is computed again.",
        ),
        Alert(
            "TopspinSlowFirstToken",
            f"{ttft.text} > {ttft_p95_s:g}",
            "10m",
            "warning",
            "first-tokens-are-slow",
            f"First tokens of {_ENGINE} take {{{{ $value | humanizeDuration }}}} (p95)",
            f"The 95th percentile of the time to the first token is above {ttft_p95_s:g} s.",
        ),
    ]


def _shape() -> list[Alert]:
    of = _catalogue()
    balance = of.value("expert_balance", where={"table": '="current"'})
    return [
        Alert(
            "TopspinExpertImbalance",
            f"{balance.text} > {IMBALANCE:g}",
            "30m",
            "warning",
            "expert-nodes-are-unequally-loaded",
            f"The busiest expert node of {_ENGINE} has {{{{ $value | humanize }}}} times the mean "
            "load",
            "The others wait for it in every layer.",
        ),
    ]
