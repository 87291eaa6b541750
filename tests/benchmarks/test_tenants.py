"""A tenant beside another one's flood, from the figures of both loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tenants
from benchmarks.experiment import TextTable
from benchmarks.load.started_server import StartedServer

SERVER = StartedServer("true", url="http://127.0.0.1:1", log=Path("unused"), ready_timeout_s=1.0)


class Client:
    """A load that has ended: its figures are there."""

    def __init__(self, status: int) -> None:
        self._status = status
        self.signals: list[int] = []

    def wait(self, timeout: float | None = None) -> int:
        return self._status

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def measured(folder: Path, tenant: str, connections: int) -> None:
    """Write what a load measures: each tenant's tokens/s fall with the other's connections."""
    figures = {
        "request_throughput": 1.0,
        "output_throughput": 100.0 if tenant == "many" else 1000.0 / connections,
        "median_ttft_ms": 10.0 * connections,
        "p99_ttft_ms": 20.0 * connections,
        "median_tpot_ms": 5.0,
        "topspin": {"refused": 7 if tenant == "many" else 0},
    }
    (folder / f"{tenant}.json").write_text(json.dumps(figures))


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Client]]:
    started: dict[str, list[Client]] = {"few": [], "many": []}
    asked = {"connections": 0}

    def client(server: StartedServer, tenant: str, folder: Path, *flags: str) -> Client:
        if tenant == "many":
            asked["connections"] = int(flags[flags.index("--max-concurrency") + 1])
        measured(folder, tenant, asked["connections"])
        started[tenant].append(Client(0))
        return started[tenant][-1]

    monkeypatch.setattr(tenants, "client", client)
    return started


def test_the_flood_is_compared_with_a_full_server(clients: dict[str, list[Client]]) -> None:
    rounds = [[tenants.beside(SERVER, count) for count in (4, 64, 200)] for _ in range(2)]
    assert [each.signals for each in clients["many"]] == [[2]] * 6
    assert [each.signals for each in clients["few"]] == [[]] * 6
    shown = list(tenants.layout({"model": "tiny", "rounds": rounds}))
    (rows,) = (each.rows for each in shown if isinstance(each, TextTable))
    assert [row[0] for row in rows] == ["4", "64", "200"]
    assert {row[-1] for row in rows} == {"7"}
    assert shown[-1] == "The flood leaves it 32% of its tokens/s, and 3.12x its TTFT."


def test_a_tenant_without_an_answer_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def client(server: StartedServer, tenant: str, folder: Path, *flags: str) -> Any:
        return Client(int(tenant == "few"))

    monkeypatch.setattr(tenants, "client", client)
    with pytest.raises(SystemExit, match="got no answer"):
        tenants.beside(SERVER, 4)
