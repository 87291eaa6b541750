"""`topspin serve --draft-nodes`: a process of its own, whose end costs drafts and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.system.conftest import NUM_TOKENS, Tiny
from tests.system.rig.chaos import Streams, check_identical
from tests.system.rig.server import Server
from tests.system.test_speculation import FLAGS, TREES, accepted, answers

TIMEOUT_S = 60.0


def streams_during(server: Server, tiny: Tiny, fault: signal.Signals) -> None:
    """Check streams in the middle of which the draft node gets a signal."""
    streams = Streams(server.url, tiny.prompts * 2, NUM_TOKENS)
    streams.wait_for_all()
    # One that is frozen for long is being replaced: it may be gone already.
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pids["draft 0"], fault)
    check_identical(streams.join(), tiny.tokens * 2)


def answers_until_accepted(server: Server, tiny: Tiny, count: int) -> None:
    """Ask until so many more tokens of drafts were accepted: how many, depends on the machine."""
    before, deadline_s = accepted(server), time.monotonic() + TIMEOUT_S
    while accepted(server) < before + count:
        found = answers(server, tiny.prompts, max_tokens=NUM_TOKENS, return_token_ids=True)
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
        answers(server, tiny.prompts, max_tokens=NUM_TOKENS)
        assert time.monotonic() - began_s < 10, "each step would have waited for an answer"
        streams_during(server, tiny, signal.SIGKILL)
        # It is started again, and then drafts as before.
        while "scheduler: draft 0 ready" not in server.output.partition("started again")[2]:
            answers(server, tiny.prompts[:1], max_tokens=1)
            assert time.monotonic() - began_s < TIMEOUT_S, server.output
        answers_until_accepted(server, tiny, 20)
