"""Coding agents by the lines of docs/agents.md, against the server of `make serve-agents`.

Each answers a question and, in the same conversation, another one, whose prompt is found cached
but for its end. They reach no other server: those of https are behind a proxy that is not there.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.clients.conftest import Client
from tests.system.rig.server import Server
from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs/agents.md"
CLAUDE = 'claude --tools "Bash,Edit,Read,Write"'
FIRST, SECOND = "What is the capital of France?", "And that of Italy?"
# A first prompt of 9,000 tokens takes minutes on two cores without AVX512.
LIMIT_S = 900
MIN_CACHED = 0.95
OFFLINE = """\
export HTTPS_PROXY=http://127.0.0.1:9 NO_PROXY=127.0.0.1
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 OPENCODE_DISABLE_AUTOUPDATE=1
"""


class Agent(NamedTuple):
    """An agent's environment, its file of settings if it has one, and its commands."""

    environment: str
    settings: str
    first: str
    second: str


AGENTS = [
    Agent("claude-code", "", f'{CLAUDE} -p "{FIRST}"', f'{CLAUDE} -p --continue "{SECOND}"'),
    Agent(
        "codex",
        ".codex/config.toml",
        f'codex exec --skip-git-repo-check "{FIRST}"',
        f'codex exec --skip-git-repo-check resume --last "{SECOND}"',
    ),
    Agent(
        "opencode",
        "opencode.json",
        f'opencode run "{FIRST}"',
        f'opencode run --continue "{SECOND}"',
    ),
]


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    made = subprocess.run(
        ["make", "-n", "-C", str(ROOT), "serve-agents"], capture_output=True, text=True, check=True
    )
    [flags] = re.findall(r"^exec \S+/topspin serve smollm2-moe (.*)", made.stdout, re.MULTILINE)
    with Server(model, tmp_path_factory.mktemp("server"), *shlex.split(flags)) as server:
        yield server.url


def lines_of(agent: Agent, url: str) -> str:
    """Return the lines of the agent's section, for this server and its model."""
    section = {"claude-code": "Claude Code", "codex": "Codex", "opencode": "opencode"}
    name = section[agent.environment]
    after = PAGE.read_text().partition(f"\n## {name}\n")[2]
    [text] = [text for _, text in blocks(PAGE) if text in after.partition("\n## ")[0]]
    assert len(text.splitlines()) == 3
    changed = {"http://127.0.0.1:8000": url, "smollm2-moe": "tiny"}
    for word, other in changed.items():
        text = text.replace(word, other)
    return text


def prompt_tokens(url: str) -> tuple[float, float]:
    """Return how many tokens of prompts were looked up in the cache so far, and found."""
    text = httpx.get(f"{url}/metrics").text

    def total(name: str) -> float:
        found = re.findall(rf"^topspin_prefix_cache_{name}_total(?:{{.*}})? (\S+)", text, re.M)
        return sum(map(float, found))

    return total("queries"), total("hits")


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.environment)
def test_an_agent_answers_twice(agent: Agent, url: str, run: Client, tmp_path: Path) -> None:
    lines = lines_of(agent, url)
    exports = "" if agent.settings else lines.replace(agent.first, "")
    if agent.settings:
        settings = tmp_path / agent.settings
        settings.parent.mkdir(exist_ok=True)
        settings.write_text(lines)

    def say(command: str) -> None:
        text = f"{OFFLINE}{exports}exec timeout --kill-after=9 {LIMIT_S} {command}"
        assert run(agent.environment, "bash", "-c", text, limit_s=LIMIT_S + 20).strip()

    say(agent.first)
    asked, found = prompt_tokens(url)
    say(agent.second)
    asked_now, found_now = prompt_tokens(url)
    assert asked_now - asked > 2_000
    assert (found_now - found) / (asked_now - asked) >= MIN_CACHED
