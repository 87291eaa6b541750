"""The memory that a plan's containers ask for, and what they need."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import httpx
import pytest
import yaml

from deploy.services.memory import SERVER_BYTES
from models.sources.hub import DEFAULT_MODEL, cache_root, resolve_model
from tests.system.containers.cgroups import memory_group, num_killed, resident_bytes
from tests.system.containers.compose import Composed, needs_compose
from tests.system.containers.files import HEADERS, make_keys, render
from tests.system.containers.podman import Podman

MIB = 2**20
NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 16, 160, 24
"""They fill a cache of 64 MiB, which has 2,900 tokens."""


def ask(url: str, number: int) -> int:
    """Send a request of tokens that no other has; returns its status."""
    random = Random(number)
    body = {
        "model": DEFAULT_MODEL,
        "prompt": [random.randrange(1000, 40000) for _ in range(NUM_PROMPT)],
        "max_tokens": NUM_OUTPUT,
        "ignore_eos": True,
    }
    return httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=240).status_code


@pytest.mark.slow
@pytest.mark.timeout(2400)
@needs_compose
def test_containers_have_room_in_what_the_plan_asks_for(podman: Podman, tmp_path: Path) -> None:
    resolve_model(DEFAULT_MODEL)
    settings = {"transport": "tcp", "form": "compose", "cache": "64MiB"}
    out = render(DEFAULT_MODEL, tmp_path, cache_root(), **settings)
    make_keys(out)
    services = yaml.safe_load((out / "compose.yaml").read_text())["services"]
    asked = {name: own.get("mem_reservation", SERVER_BYTES) for name, own in services.items()}
    limits = {name: int(1.1 * size) for name, size in asked.items()}
    with Composed(podman, out, limits) as engine:
        engine.wait_until_healthy()
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            statuses = list(pool.map(lambda number: ask(engine.url, number), range(NUM_REQUESTS)))
        assert statuses == [200] * NUM_REQUESTS
        groups = {name: memory_group(engine.state(name)["State"]["Pid"]) for name in asked}
        found = {name: resident_bytes(group) for name, group in groups.items()}
        print({name: f"{found[name] // MIB} of {asked[name] // MIB} MiB" for name in asked})
        assert {num_killed(group) for group in groups.values()} == {0}
        assert {engine.state(name)["RestartCount"] for name in asked} == {0}
        for name in ("attention-0", "expert-0"):
            assert abs(found[name] / asked[name] - 1) <= 0.05, name
        for name in ("scheduler", "gateway"):
            assert found[name] <= asked[name], name
