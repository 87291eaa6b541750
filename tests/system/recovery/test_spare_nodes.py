"""Spare nodes as processes: one takes a killed node's place at once, and no token changes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.engine import engine_config
from tests.structs import changed
from tests.system.conftest import NUM_TOKENS, Tiny
from tests.system.rig.chaos import Streams, check_identical, wait_until
from tests.system.rig.retrying import RetryingStreams
from tests.system.rig.server import Server
from topspin.plan.settings import FailoverPolicy

NUM_STEPS = 80
# Two MoE layers, two hops each: about 80 ms a step, so that streams outlast what happens.
SLOW_LINK_US = 20_000.0


def wait_for_spares(server: Server, num_spares: int) -> None:
    wait_until(
        lambda: len(re.findall(r"the spare \w+ \d has loaded", server.output)) >= num_spares,
        "no spare",
    )


def serving_pid(server: Server, name: str) -> int:
    """Return the process that has a place now."""
    pattern = rf"scheduler: {name} (?:joined )?\(pid (\d+)\)(?: takes its place|\n)"
    return int(re.findall(pattern, server.output)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_spare_takes_the_place_of_a_killed_node(
    tiny: Tiny, tmp_path: Path, transport: str, record_property: pytest.RecordProperty
) -> None:
    config = engine_config(
        tiny.path,
        attention_nodes=1,
        expert_nodes=2,
        transport=transport,
        latency_us=SLOW_LINK_US,
        kv_cache_bytes=2**20,
    )
    policy = FailoverPolicy(restart=True, standby="weights")
    with Server(tiny.path, tmp_path, plan=changed(config, {"failover": policy})) as server:
        wait_for_spares(server, 3)
        expected = [each.tokens for each in Streams(server.url, tiny.prompts, NUM_STEPS).join()]
        assert [tokens[:NUM_TOKENS] for tokens in expected] == tiny.tokens
        for number, name in enumerate(("expert 1", "attention 0", "expert 1"), 4):
            killed, seen = serving_pid(server, name), len(server.output)
            streams = RetryingStreams(server.url, tiny.prompts, NUM_STEPS)
            streams.wait_for_events(12)
            os.kill(killed, signal.SIGKILL)
            check_identical(streams.join(), expected)
            assert streams.num_retries == 0
            pause = f"{streams.longest_gap_s:.1f} s"
            record_property("figure", f"{transport}, {name} killed: {pause}")
            output = server.output[seen:]
            assert "takes its place: it was the spare" in output
            assert serving_pid(server, name) != killed
            # The place was never empty.
            assert "waiting for" not in output
            # The one that was killed is started again, as the spare.
            wait_for_spares(server, number)
        streams = Streams(server.url, tiny.prompts, NUM_STEPS)
        streams.wait_for_events(12)
        server.kill("scheduler")
        check_identical(streams.join(), expected)
        wait_for_spares(server, number + 3)
