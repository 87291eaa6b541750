"""Streams of real processes continue as if undisturbed, whatever happens to nodes.

The smoke row runs by default; the matrix and the soak are slow. Every event is one of
tests.system.rig.chaos; each run must give the tokens of an undisturbed run.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.conftest import Tiny, make_tiny
from tests.system.rig import chaos
from tests.system.rig.chaos import (
    EVENTS,
    Streams,
    check_identical,
    stream_body,
    wait_until,
    wait_until_whole,
)
from tests.system.rig.server import Server, Settings
from topspin.logs import FORMAT_VARIABLE, is_json
from topspin.plan.settings import BalancePolicy

NUM_TOKENS = 60
SOAK_S = float(os.environ.get("TOPSPIN_SOAK_S", "600"))
MIN_MARGIN = 5e-4
# A step takes about 40 ms, so that events fall into the middle of one.
SLOW: Settings = {
    "latency_us": 5000,
    "deadline_s": 2,
    "restart": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Return a model with prompts of which the last one is long."""
    prompts = [[5, 9, 200, 31, 77], list(range(40, 70)), [(7 * i) % 250 for i in range(150)]]
    directory = tmp_path_factory.mktemp("chaos")
    return make_tiny(directory, "qwen3_moe", prompts, NUM_TOKENS, margin=MIN_MARGIN)


@pytest.fixture(scope="module")
def two_attention_nodes(model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server whose logs are JSON objects."""
    directory = tmp_path_factory.mktemp("smoke")
    flags = ("--attention-nodes", "2")
    env = {FORMAT_VARIABLE: "json"}
    with Server(model.path, directory, *flags, settings=SLOW, env=env) as server:
        yield server


@pytest.mark.slow
def test_every_process_names_a_request_by_its_id_also_after_a_loss(
    model: Tiny, two_attention_nodes: Server
) -> None:
    server = two_attention_nodes
    body = {
        "model": "tiny",
        "prompt": model.prompts[0],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    url, headers = f"{server.url}/v1/completions", {"X-Request-Id": "traced"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as response:
        assert response.headers["X-Request-Id"] == "traced"
        events = response.iter_lines()
        next(events)
        chaos.kill(server, "expert 0")
        rest = [event for event in events if event]
    assert rest[-1] == "data: [DONE]"

    def logged() -> list[dict[str, Any]]:
        return [json.loads(line) for line in server.output.splitlines() if is_json(line)]

    def told() -> list[dict[str, Any]]:
        return [each for each in logged() if each.get("request_id") == "traced"]

    wait_until(lambda: any(each["role"] == "gateway" for each in told()), "not answered")
    assert [(each["role"], each["message"].partition(": ")[2]) for each in told()] == [
        ("scheduler", "request admitted"),
        ("scheduler", "request replayed"),
        ("scheduler", "request admitted"),
        ("scheduler", "request finished"),
        ("gateway", "answered"),
    ]
    answered = told()[-1]
    assert (answered["status"], answered["output_tokens"]) == (200, NUM_TOKENS)
    assert answered["prompt_tokens"] == len(model.prompts[0])
    roles = {each["role"] for each in logged()}
    assert {"topspin", "gateway", "scheduler", "attention", "expert"} <= roles
    plain = [line for line in server.output.splitlines() if not is_json(line)]
    assert all(line.startswith(("Topspin is ready", "Try: ")) for line in plain), plain


@pytest.mark.slow
def test_streams_survive_a_killed_expert_and_a_frozen_attention_node(
    model: Tiny, two_attention_nodes: Server
) -> None:
    """The smoke row; test_detection.py tests how soon losses are noticed."""
    server = two_attention_nodes
    wait_until_whole(server)
    seen = len(server.output)
    streams = Streams(server.url, model.prompts, NUM_TOKENS)
    streams.wait_for_events(12)
    chaos.kill(server, "expert 0")
    wait_until(lambda: "lost expert 0" in server.output[seen:], "not noticed")
    wait_until_whole(server)
    # There is no other expert node: what came until now came before, and half is still to come.
    streams.wait_for_events(12)
    chaos.stop_and_continue(server, "attention 0")
    check_identical(streams.join(), model.tokens)
    # The streams go on elsewhere: they may end before the node is back.
    wait_until(lambda: "attention 0 lives" in server.output, "not back")
    assert "attention 0 was killed" not in server.output


# Plans the expert table all the time and takes every gain: experts are always moving.
RESTLESS: Settings = {
    "redundant_experts": 2,
    "balance": BalancePolicy(interval_s=0.05, min_gain=0, half_life_pairs=1),
}


NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture(
    scope="module",
    params=["shm", "tcp", "shm restless", pytest.param("nixl", marks=NEEDS_NIXL)],
)
def chaotic(
    model: Tiny, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("chaotic")
    transport, _, restless = request.param.partition(" ")
    nodes = ("--attention-nodes", "2", "--expert-nodes", "2")
    flags = ("--transport", transport, *nodes, "--max-num-batched-tokens", "64")
    module = "tests.system.rig.chaos_serve"
    settings = {**SLOW, **(RESTLESS if restless else {})}
    with Server(model.path, directory, *flags, module=module, settings=settings) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["prefill", "mid-stream"])
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("role", ["attention 0", "expert 1"])
def test_the_matrix(chaotic: Server, model: Tiny, role: str, event: str, moment: str) -> None:
    wait_until_whole(chaotic)
    seen = len(chaotic.output)
    streams = Streams(chaotic.url, model.prompts, NUM_TOKENS)
    if moment == "mid-stream":
        streams.wait_for_events(15)
    else:
        # The long prompt alone takes three steps.
        time.sleep(0.06)
    EVENTS[event](chaotic, role)
    check_identical(streams.join(), model.tokens)
    if event in ("kill", "stop and continue"):
        assert f"lost {role}" in chaotic.output[seen:]


@pytest.mark.slow
def test_experts_have_moved_where_they_should(
    chaotic: Server, request: pytest.FixtureRequest
) -> None:
    """Runs after the rows of the matrix; only a restless server has moved experts."""
    moved = chaotic.output.count("is in use")
    assert (moved >= 3) == ("restless" in request.node.callspec.id)


@pytest.mark.slow
def test_continued_streams_have_the_bits_of_undisturbed_ones(model: Tiny, tmp_path: Path) -> None:
    """--deterministic in bfloat16; tests/identity compares whole distributions."""
    flags = ("--deterministic", "--dtype", "bfloat16", "--transport", "tcp")
    nodes = ("--attention-nodes", "2", "--expert-nodes", "2")
    with Server(model.path, tmp_path, *flags, *nodes, settings=SLOW) as server:

        def start() -> Streams:
            return Streams(server.url, model.prompts, NUM_TOKENS, num_logprobs=5)

        undisturbed = start().join()
        assert all(len(each.logprobs) > 2 * NUM_TOKENS for each in undisturbed)
        for role in ("expert 1", "attention 0"):
            streams = start()
            streams.wait_for_events(12)
            chaos.kill(server, role)
            assert streams.join() == undisturbed
            wait_until_whole(server)
        assert "lost expert 1" in server.output
        assert "lost attention 0" in server.output


@pytest.mark.slow
@pytest.mark.parametrize("recordings", ["recorded", "layer by layer"])
def test_recorded_steps_survive_every_event(model: Tiny, tmp_path: Path, recordings: str) -> None:
    """In bfloat16, where a continuation on other nodes may end in other tokens than undisturbed."""
    num_tokens = 80
    # Longer ones would be attended to in groups, which depend on what the cache has of them.
    prompts = [[7, 3, 9, 200, 4], [5], [100, 101, 102, 250]]
    flags = ["--dtype", "bfloat16", "--attention-nodes", "2", "--expert-nodes", "2"]
    if recordings != "recorded":
        flags.append("--enforce-eager")
    settings: Settings = {"deadline_s": 2, "restart": True}
    module = "tests.system.rig.chaos_serve"
    with Server(model.path, tmp_path, *flags, module=module, settings=settings) as server:
        expected = [each.tokens for each in Streams(server.url, prompts, num_tokens).join()]
        assert [len(tokens) for tokens in expected] == [num_tokens] * len(prompts)
        roles = itertools.cycle(("attention 0", "expert 1", "expert 0"))
        for event, role in zip(EVENTS, roles, strict=False):
            streams = Streams(server.url, prompts, num_tokens)
            streams.wait_for_events(15)
            before = [list(each.tokens) for each in streams.watched]
            EVENTS[event](server, role)
            for watched, early, whole in zip(streams.join(), before, expected, strict=True):
                assert (watched.status, watched.errors, watched.num_done) == (200, [], 1), event
                assert len(watched.tokens) == num_tokens, event
                assert watched.tokens[: len(early)] == early == whole[: len(early)], event
            wait_until_whole(server)
        again = [each.tokens for each in Streams(server.url, prompts, num_tokens).join()]
        assert again == expected


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
def test_a_soak_of_losses_leaks_nothing(
    model: Tiny, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    """Streams, losses and clients that leave, for ten minutes or TOPSPIN_SOAK_S seconds.

    Memory, descriptors and threads of the other processes do not grow, and no cache block stays
    taken.
    """
    flags = ("--attention-nodes", "2", "--expert-nodes", "2")
    module = "tests.system.rig.chaos_serve"
    with Server(model.path, tmp_path, *flags, module=module, settings=SLOW) as server:
        watched = [server.pids[role] for role in ("scheduler", "gateway", "attention 1")]
        samples: list[list[tuple[int, int, int]]] = []
        ends = time.monotonic() + SOAK_S
        roles = itertools.cycle(("attention 0", "expert 1"))
        lengths = itertools.cycle((3, 150, 17, 60, 100))
        for event, role in zip(itertools.cycle(EVENTS), roles, strict=False):
            streams = Streams(server.url, model.prompts, NUM_TOKENS)
            streams.wait_for_events(10)
            with stream_that_one_leaves(server.url, next(lengths)):
                with stream_that_one_leaves(server.url, next(lengths)):
                    pass
                EVENTS[event](server, role)
            check_identical(streams.join(), model.tokens)
            wait_until_whole(server)
            wait_until(lambda: gauges_in_use(server) == [0.0] * 3, "something is still taken")
            samples.append([use_of(pid) for pid in watched])
            if time.monotonic() > ends:
                break
        assert len(samples) >= 4
        for name, first, last in zip(
            ("scheduler", "gateway", "attention 1"),
            samples[len(samples) // 4],
            samples[-1],
            strict=True,
        ):
            told = f"{name}, KiB, descriptors and threads: {first} -> {last}, {len(samples)} losses"
            record_property("figure", told)
            assert last[0] <= first[0] * 1.1 + 8192, told
            assert last[1] <= first[1] + 4, told
            assert last[2] <= first[2] + 2, told


@contextmanager
def stream_that_one_leaves(url: str, length: int) -> Iterator[None]:
    """Stream the answer to a prompt of that length; leave within it, at the end of the block."""
    body = stream_body([(11 * i + length) % 250 for i in range(length)], 100)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        assert next(response.iter_lines()).startswith("data: ")
        yield


def gauges_in_use(server: Server) -> list[float]:
    """Return the numbers of running and waiting requests, and the share of taken cache blocks."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    values = {sample.partition("{")[0]: value for sample, value in samples}
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return [float(values[f"topspin_{name}"]) for name in names]


def use_of(pid: int) -> tuple[int, int, int]:
    """Return a process's resident KiB, and how many descriptors and threads it has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = dict(line.split(":", 1) for line in lines)
    num_descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return int(told["VmRSS"].split()[0]), num_descriptors, int(told["Threads"])
