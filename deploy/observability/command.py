"""`topspin deploy dashboard` and `topspin deploy alerts`: write what watches an engine.

Owns both commands' flags and files. Called by app.cli.deploy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.observability.files import TTFT_P95_S, dashboard, prometheus_rule, rules
from deploy.yaml_text import yaml_text
from topspin.errors import ConfigError


def add_dashboard(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `topspin deploy dashboard`."""
    _add_output(parser, "Grafana's JSON")
    parser.set_defaults(run=write_dashboard)


def add_alerts(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `topspin deploy alerts`."""
    _add_output(parser, "YAML")
    parser.add_argument(
        "--format",
        choices=("rules", "PrometheusRule"),
        default="rules",
        help="a rule file of Prometheus, or the Prometheus Operator's object (%(default)s)",
    )
    parser.add_argument("--name", default="topspin", help="of a PrometheusRule (%(default)s)")
    parser.add_argument(
        "--ttft-p95",
        type=float,
        default=TTFT_P95_S,
        metavar="SECONDS",
        help="time to the first token that 95 %% should not exceed (%(default)g)",
    )
    parser.set_defaults(run=write_alerts)


def _add_output(parser: argparse.ArgumentParser, form: str) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help=f"file to write ({form})"
    )


def write_dashboard(parsed: argparse.Namespace) -> int:
    """Write the dashboard. Raises ConfigError."""
    _write(parsed.output, dashboard())
    return 0


def write_alerts(parsed: argparse.Namespace) -> int:
    """Write the alert rules. Raises ConfigError."""
    if parsed.format == "rules":
        content = rules(parsed.ttft_p95)
    else:
        content = prometheus_rule(parsed.name, parsed.ttft_p95)
    _write(parsed.output, yaml_text(content))
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"-o {path}: {error.strerror}") from error
