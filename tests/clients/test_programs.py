"""Libraries that clients import: each program uses one as its users do, and checks what it got."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.conftest import Client

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("litellm", "chat_litellm.py"),
        ("langchain", "chat_langchain.py"),
        ("openai-agents", "agent_openai.py"),
    ],
)
def test_a_library(name: str, program: str, url: str, run: Client) -> None:
    run(name, "python", str(PROGRAMS / program), url)


@pytest.mark.parametrize("program", ["node_openai.cjs", "node_anthropic.cjs"])
def test_a_library_of_node(program: str, url: str, run: Client) -> None:
    run("node-sdks", "node", str(PROGRAMS / program), url)
