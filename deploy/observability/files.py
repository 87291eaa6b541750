"""The Grafana dashboard and the Prometheus alert rules: the data files beside this module.

Owns their reading, and the one value that they leave open. Knows no metric: that every query is of
what /metrics has is a test's to say. Called by command.py and deploy.kubernetes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from server.gateway.operations.metrics import TTFT_BUCKETS_S
from topspin.errors import ConfigError

TTFT_P95_S: Final = 5.0
"""The default of the seconds to the first token that 95 % should not exceed."""

Object = dict[str, Any]

_FOLDER: Final = Path(__file__).parent


def dashboard() -> str:
    """Return the dashboard's JSON, as Grafana imports it."""
    return (_FOLDER / "dashboard.json").read_text(encoding="utf-8")


def rules(ttft_p95_s: float = TTFT_P95_S) -> Object:
    """Return a rule file. `ttft_p95_s`: seconds to the first token that 95 % should not exceed.

    Raises ConfigError if the metric cannot tell that they do.
    """
    most_s = TTFT_BUCKETS_S[-1]
    if not 0 < ttft_p95_s < most_s:
        raise ConfigError(
            f"a p95 of {ttft_p95_s:g} s to the first token: must be above 0, and below {most_s:g}, "
            "the metric's greatest bucket"
        )
    text = (_FOLDER / "alerts.yaml").read_text(encoding="utf-8")
    found: Object = yaml.safe_load(text.replace("TTFT_P95_S", f"{ttft_p95_s:g}"))
    return found


def prometheus_rule(name: str, ttft_p95_s: float = TTFT_P95_S) -> Object:
    """Return the same for the Prometheus Operator, as an object called `name`."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": name}},
        "spec": rules(ttft_p95_s),
    }
