"""`topspin serve --draft-nodes`: a process of its own, whose end costs drafts and nothing else."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import httpx
import pytest

from tests.system.conftest import Tiny
from tests.system.server import Server
from tests.system.test_speculation import FLAGS, TREES, accepted, answers

NUM_STREAMS = 8
TIMEOUT_S = 60.0


def stream(server: Server, prompt: list[int], begun: Barrier, go_on: Barrier) -> list[int]:
    """Return the tokens of a stream, which meets the others at its first event."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 24,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S) as got:
        has_met = False
        for line in got.iter_lines():
            if not line.startswith("data: {"):
                continue
            if not has_met:
                has_met = True
                begun.wait(TIMEOUT_S)
                go_on.wait(TIMEOUT_S)
            tokens += json.loads(line[6:])["choices"][0].get("token_ids", [])
    return tokens


def streams_during(server: Server, tiny: Tiny, fault: signal.Signals) -> None:
    """Check eight streams in the middle of which the draft node gets a signal."""
    begun, go_on = Barrier(NUM_STREAMS + 1), Barrier(NUM_STREAMS + 1)
    places = [idx % len(tiny.prompts) for idx in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        found = [pool.submit(stream, server, tiny.prompts[p], begun, go_on) for p in places]
        begun.wait(TIMEOUT_S)
        os.kill(server.pids["draft 0"], fault)
        go_on.wait(TIMEOUT_S)
        for place, each in zip(places, found, strict=True):
            assert each.result() == tiny.tokens[place]


def answers_until_accepted(server: Server, tiny: Tiny, count: int) -> None:
    """Ask until so many more tokens of drafts were accepted: how many, depends on the machine."""
    before, deadline_s = accepted(server), time.monotonic() + TIMEOUT_S
    while accepted(server) < before + count:
        found = answers(server, tiny.prompts, max_tokens=24, return_token_ids=True)
        assert [each["token_ids"] for each in found] == tiny.tokens
        assert time.monotonic() < deadline_s, server.output


@pytest.mark.slow
def test_a_draft_node_that_is_frozen_and_then_killed_is_only_missed(
    tiny: Tiny, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--draft-nodes", "1", "--speculative-config", TREES % tiny.path)
    with Server(tiny.path, tmp_path, *flags) as server:
        answers_until_accepted(server, tiny, 20)
        streams_during(server, tiny, signal.SIGSTOP)
        began_s = time.monotonic()
        answers(server, tiny.prompts, max_tokens=24)
        assert time.monotonic() - began_s < 10, "each step would have waited for an answer"
        streams_during(server, tiny, signal.SIGKILL)
        # It is started again, and then drafts as before.
        while "scheduler: draft 0 ready" not in server.output.partition("started again")[2]:
            answers(server, tiny.prompts[:1], max_tokens=1)
            assert time.monotonic() - began_s < TIMEOUT_S, server.output
        answers_until_accepted(server, tiny, 20)
