"""`topspin serve` as it is by default stays up when one of its processes freezes.

A pause that no heartbeat notices is nothing. After a longer one a node comes back with its weights.
A process that stays frozen is ended and another takes its place (but for a gateway, whose clients
only it can answer); the streams of clients go on, with the tokens of an undisturbed run.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.system.conftest import Tiny
from tests.system.rig.chaos import Streams, check_identical, wait_until, wait_until_whole
from tests.system.rig.server import Server, Settings, descendants
from tests.system.test_speculation import FLAGS, TREES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# The limit of the heartbeat is 1.6 s.
SHORT_S = 0.4
LONG_S = 25.0
NUM_TOKENS = 120
# Two MoE layers, two hops each: about 80 ms a step, so that streams outlast what happens.
SLOW_LINK: Settings = {"latency_us": 20_000}
ROLES = ["local", "attention 0", "expert 0", "draft 0", "scheduler"]


def serve(tiny: Tiny, directory: Path, role: str) -> Server:
    flags: tuple[str, ...] = ()
    if role == "local":
        flags = ("--transport", "local")
    if role == "draft 0":
        flags = (*FLAGS, "--draft-nodes", "1", "--speculative-config", TREES % tiny.path)
    return Server(tiny.path, directory, *flags, settings=SLOW_LINK)


def streams(server: Server, tiny: Tiny) -> Streams:
    begun = Streams(server.url, tiny.prompts, NUM_TOKENS)
    begun.wait_for_events(12)
    return begun


def undisturbed(server: Server, tiny: Tiny) -> list[list[int]]:
    tokens = [each.tokens for each in streams(server, tiny).join()]
    for found, oracle in zip(tokens, tiny.tokens, strict=True):
        assert found[: len(oracle)] == oracle
    return tokens


def pause(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("role", ROLES)
def test_a_short_pause_is_nothing_and_a_process_that_stays_frozen_is_replaced(
    tiny: Tiny, tmp_path: Path, role: str
) -> None:
    with serve(tiny, tmp_path, role) as server:
        expected, pid = undisturbed(server, tiny), server.pids[role]
        seen, begun = len(server.output), streams(server, tiny)
        pause(pid, SHORT_S)
        check_identical(begun.join(), expected)
        assert "WARNING" not in server.output[seen:]
        assert server.pids_by_role() == server.pids
        begun = streams(server, tiny)
        os.kill(pid, signal.SIGSTOP)
        name = "local node" if role == "local" else role
        for told in (
            "was silent for 1.6 s",
            f"{name} (pid {pid}) is taken for dead and is killed",
            f"topspin: {name} was killed by SIGKILL; it is started again in 0.2 s",
        ):
            wait_until(partial(said, server, told), f"not said: {told}")
        check_identical(begun.join(), expected)
        wait_until(lambda: server.pids_by_role().get(role, pid) != pid, "not back")
        wait_until_whole(server)
        assert [each.tokens for each in streams(server, tiny).join()] == expected


def test_nodes_that_wake_soon_come_back_with_their_weights(tiny: Tiny, tmp_path: Path) -> None:
    """One whose experts have copies elsewhere, and, while it is away, the one with the copies."""
    flags = ("--expert-nodes", "2", "--redundant-experts", "8")
    with Server(tiny.path, tmp_path, *flags, settings=SLOW_LINK) as server:
        expected, pids = undisturbed(server, tiny), server.pids
        begun = streams(server, tiny)
        os.kill(pids["expert 0"], signal.SIGSTOP)
        wait_until(partial(said, server, "lost expert 0"), "not noticed")
        os.kill(pids["expert 1"], signal.SIGSTOP)
        wait_until(partial(said, server, "lost expert 1"), "not noticed")
        for role in ("expert 1", "expert 0"):
            os.kill(pids[role], signal.SIGCONT)
        check_identical(begun.join(), expected)
        wait_until_whole(server)
        assert server.pids == pids


def said(server: Server, text: str) -> bool:
    return text in server.output


def test_a_gateway_that_was_frozen_goes_on_with_its_streams(tiny: Tiny, tmp_path: Path) -> None:
    with serve(tiny, tmp_path, "gateway") as server:
        expected, pid = undisturbed(server, tiny), server.pids["gateway"]
        seen, begun = len(server.output), streams(server, tiny)
        pause(pid, SHORT_S)
        check_identical(begun.join(), expected)
        assert "WARNING" not in server.output[seen:]
        begun = streams(server, tiny)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: "a gateway is gone" in server.output, "not noticed")
        os.kill(pid, signal.SIGCONT)
        check_identical(begun.join(), expected)
        assert server.pids_by_role() == server.pids


@pytest.mark.parametrize("transport", ["local", "shm"])
def test_a_pause_of_the_whole_machine_loses_nothing(
    tiny: Tiny, tmp_path: Path, transport: str
) -> None:
    with Server(tiny.path, tmp_path, "--transport", transport, settings=SLOW_LINK) as server:
        expected = undisturbed(server, tiny)
        begun = streams(server, tiny)
        everyone = [server.process.pid, *descendants(server.process.pid)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in everyone:
                os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(LONG_S)
        check_identical(begun.join(), expected)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("role", "transport"), [("expert 0", "shm"), ("attention 0", "shm"), ("local", "local")]
)
def test_a_restarted_node_does_not_mix_other_weights_in(
    tmp_path: Path, role: str, transport: str
) -> None:
    path = make_checkpoint(tmp_path / "model", "qwen3_moe")
    with Server(path, tmp_path, "--transport", transport) as server:
        file = path / "model.safetensors"
        tensors = {name: tensor + torch.rand(()) for name, tensor in load_file(file).items()}
        save_file(tensors, tmp_path / "other.safetensors", metadata={"format": "pt"})
        (tmp_path / "other.safetensors").replace(file)
        server.kill(role)
        body = {"model": "tiny", "prompt": [5, 9], "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=100)
        assert answer.status_code == 503, answer.text
        assert "their contents differ in model.safetensors" in server.output
        # It is started five times more, which takes long on a busy machine.
        assert server.wait(250) == 1
        assert "it is not started again" in server.output
