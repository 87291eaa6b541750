"""One browser and one server for all tests of the page.

Skipped where there is no Chromium; Debian's package `chromium` brings it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.system.conftest import Tiny
from tests.system.page.browser import Browser, chromium, find_chromium
from tests.system.page.proxy import PREFIX
from tests.system.rig.server import Server

# Two MoE layers, two hops each: 100 ms a step, so that answers of a few steps, which cost
# processor time, outlast what happens.
LINK_US = 25_000
NUM_TOKENS = 60


@pytest.fixture(scope="package")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="package")
def browser(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    command = find_chromium()
    if command is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    running = chromium(command, tmp_path_factory.mktemp("chromium"))
    yield runner.run(running.__aenter__())
    runner.run(running.__aexit__(None, None, None))


@pytest.fixture(scope="package")
def server(
    browser: Browser, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose answers are the same before and after a loss."""
    directory = tmp_path_factory.mktemp("server")
    flags = ("--expert-nodes", "2", "--micro-batches", "2", "--deterministic")
    settings = {"latency_us": LINK_US}
    gateway = ("--root-path", PREFIX)
    with Server(tiny.path, directory, *flags, settings=settings, gateway=gateway) as server:
        yield server


@pytest.fixture(scope="package")
def question(server: Server) -> tuple[str, str]:
    """Return a question whose answer is long, and the answer."""
    for number in range(50):
        text = f"Serve {number}!"
        body: dict[str, Any] = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0}
        body["messages"] = [{"role": "user", "content": text}]
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "length":
            return text, choice["message"]["content"]
    raise AssertionError("the model ends all its answers early")
