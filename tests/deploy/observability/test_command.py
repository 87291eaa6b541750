"""The output of the commands, and their refusals."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from deploy.observability.command import add_alerts, add_dashboard
from deploy.observability.files import dashboard, rules
from topspin.errors import ConfigError


def run(command: str, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    {"dashboard": add_dashboard, "alerts": add_alerts}[command](parser)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


def test_the_dashboard_is_written_as_json(tmp_path: Path) -> None:
    file = tmp_path / "dashboard.json"
    assert run("dashboard", "-o", str(file)) == 0
    assert file.read_text() == dashboard()


def test_alerts_are_written_for_prometheus_or_its_operator(tmp_path: Path) -> None:
    file = tmp_path / "alerts.yaml"
    assert run("alerts", "-o", str(file)) == 0
    assert yaml.safe_load(file.read_text()) == rules()
    flags = ["--format", "PrometheusRule", "--name", "moe", "--ttft-p95", "0.75"]
    assert run("alerts", "-o", str(file), *flags) == 0
    made = yaml.safe_load(file.read_text())
    assert (made["apiVersion"], made["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert made["metadata"]["name"] == "moe"
    assert made["spec"] == rules(0.75)
    assert "> 0.75" in file.read_text()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "160"])
def test_a_limit_that_cannot_be_told_is_refused(tmp_path: Path, seconds: str) -> None:
    with pytest.raises(ConfigError, match="to the first token"):
        run("alerts", "-o", str(tmp_path / "alerts.yaml"), "--ttft-p95", seconds)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["dashboard", "alerts"])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, command: str) -> None:
    with pytest.raises(ConfigError, match="none/file: No such file"):
        run(command, "-o", str(tmp_path / "none" / "file"))
