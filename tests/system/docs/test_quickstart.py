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

import httpx
import pytest

from tests.system.rig.server import Server
from tests.test_docs import ROOT, blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PULL = "topspin pull smollm2-moe"
NUM_CHATS = 10
NUM_SEEDS = 15


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


def answers(server: Server, question: str, num_seeds: int) -> list[str]:
    """Return the texts of answers to a question, asked at once with one seed each."""

    def ask(seed: int) -> str:
        messages = [{"role": "user", "content": question}]
        body = {"model": "tiny", "messages": messages, "seed": seed}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    with ThreadPoolExecutor(num_seeds) as pool:
        return list(pool.map(ask, range(num_seeds)))


def test_ten_plain_chats_stay_on_topic(server: Server) -> None:
    for text in answers(server, "Why is the sky blue?", NUM_CHATS):
        assert text.lower().count("light") >= 2, text
        assert "blue" in text.lower(), text
        assert text.isascii(), text


def test_the_quick_starts_own_question_is_answered_whatever_the_seed(server: Server) -> None:
    question = "What is the capital of France?"
    assert question in (ROOT / "docs" / "quickstart.md").read_text()
    found = answers(server, question, NUM_SEEDS)
    assert [text for text in found if "Paris" not in text] == []
