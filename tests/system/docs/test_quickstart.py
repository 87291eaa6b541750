"""The default model for a new user: the commands of quickstart.md and README.md, plain questions.

Needs the wheel: $TOPSPIN_TEST_WHEEL, or an index that pip can reach.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.rig.server import Server
from tests.test_docs import ROOT, blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PULL = "topspin pull smollm2-moe"
NUM_CHATS = 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("default")
    given = os.environ.get("TOPSPIN_TEST_WHEEL")
    pulled = subprocess.run(
        [sys.executable, "-m", *PULL.split(), *(["--wheel", given] if given else [])],
        env={**os.environ, "TOPSPIN_CACHE": str(directory)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    path = Path(pulled.stdout.strip().removeprefix("smollm2-moe is in "))
    assert path.is_relative_to(directory)
    # A busy machine refuses nobody for the wait.
    flags = ("--kv-cache-memory", "256MiB", "--max-ttft", "0")
    with Server(path, directory, *flags) as server:
        yield server


def test_the_quick_start_works(server: Server, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]

    def run(text: str, program: tuple[str, ...] = ("bash", "-euo", "pipefail", "-c")) -> str:
        text = text.replace("smollm2-moe", "tiny").replace("8000", port)
        for name in ("chat", "trace"):
            text = text.replace(f"topspin {name}", f"topspin {name} --url {server.url}")
        done = subprocess.run(
            [*program, text],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            input="What is the capital of France?\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    page = [text for info, text in blocks(ROOT / "docs" / "quickstart.md") if info == "sh"]
    _, ask, load, look, _ = page
    readme = {text.split()[0]: text for info, text in blocks(ROOT / "README.md") if info}
    # `topspin chat` ends with its input.
    answer, _, chat = run(ask).partition("}}")
    assert '"object":"chat.completion"' in answer
    assert len(chat.split()) > 3
    assert re.search(r"Successful requests\D+16\b", run(load))
    seen = run(look)
    assert '"state":"ready"' in seen
    assert "topspin_engine_up" in seen
    assert (tmp_path / "trace.json").stat().st_size > 1000
    assert "data: [DONE]" in run(readme["curl"])
    assert len(run(readme["from"], (sys.executable, "-c")).split()) > 3


def test_ten_plain_chats_stay_on_topic(server: Server) -> None:
    def ask(seed: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        body = {"model": "tiny", "messages": messages, "seed": seed}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    with ThreadPoolExecutor(NUM_CHATS) as pool:
        choices = list(pool.map(ask, range(NUM_CHATS)))
    for choice in choices:
        text = choice["message"]["content"].lower()
        assert text.count("light") >= 2, text
        assert "blue" in text, text
        assert text.isascii(), text
