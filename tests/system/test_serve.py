"""Real processes and the official OpenAI client: tokens, streams, metrics, idleness."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

from tests.system.conftest import NUM_TOKENS, Tiny
from tests.system.rig.scores import check_echo, check_prompt_logprobs
from tests.system.rig.server import Server, cpu_seconds

LAYOUTS = [
    # Over shared memory: test_one_server_as_its_users_meet_it; every run also sees the tokens
    # of test_failure.py's servers.
    pytest.param(("--transport", "tcp", "--attention-nodes", "2", "--expert-nodes", "2"), id="tcp"),
    pytest.param(("--transport", "local", "--expert-nodes", "3"), id="local"),
]
IDLE_S = 3.0
MAX_IDLE_SHARE = 0.02


def complete(url: str, prompt: list[int], **fields: object) -> list[int]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def complete_at_once(url: str, prompts: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(partial(complete, url), prompts))


@pytest.mark.slow
@pytest.mark.parametrize("flags", LAYOUTS)
def test_processes_give_transformers_tokens(
    tiny: Tiny, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with Server(tiny.path, tmp_path, *flags, "--micro-batches", "2") as server:
        assert complete_at_once(server.url, tiny.prompts) == tiny.tokens


def test_one_server_as_its_users_meet_it(tiny: Tiny, tmp_path: Path) -> None:
    """Tokens, chat, streaming, n, scores, errors, metrics, disconnect, idleness, in one start."""
    with Server(tiny.path, tmp_path, "--transport", "shm", "--micro-batches", "2") as server:
        assert complete_at_once(server.url, tiny.prompts) == tiny.tokens
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "Serve!"}]
        whole = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=20, temperature=0
        )
        stream = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        # The second of two equal prompts may find its prefix cached; all else is equal.
        streamed, plain = chunks[-1].usage, whole.usage
        assert plain.completion_tokens > 0
        assert streamed.completion_tokens == plain.completion_tokens
        assert streamed.prompt_tokens == plain.prompt_tokens
        assert streamed.total_tokens == streamed.prompt_tokens + streamed.completion_tokens
        seeded = [
            [
                choice.text
                for choice in client.completions.create(
                    model="tiny", prompt="ab", n=3, seed=7, temperature=1.0, max_tokens=8
                ).choices
            ]
            for _ in range(2)
        ]
        assert seeded[0] == seeded[1]
        assert len(set(seeded[0])) > 1
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="tiny", prompt="x", temperature=9)
        check_echo(server.url, tiny)
        check_prompt_logprobs(server.url, tiny, "completions")
        check_prompt_logprobs(server.url, tiny, "chat/completions")
        check_disconnect_frees_the_request(server.url)
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "topspin_generation_tokens_total" in metrics
        assert "topspin_expert_tokens_total" in metrics
        check_idle(server)


def gauge(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name)))


def check_disconnect_frees_the_request(url: str) -> None:
    body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 200, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 5
    while gauge(url, "topspin_num_requests_running") > 0:
        assert time.monotonic() < deadline, "the request of a gone client goes on"


def check_idle(server: Server) -> None:
    pids = [server.process.pid, *server.pids.values()]
    before = sum(map(cpu_seconds, pids))
    started = time.monotonic()
    # The measurement takes an interval, in which the supervisor does not exit.
    with pytest.raises(Exception, match="timed out"):
        server.wait(IDLE_S)
    share = (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - started)
    assert share < MAX_IDLE_SHARE, f"an idle system uses {share:.1%} of a core"
