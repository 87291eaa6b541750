"""A node that is killed while its keys are in a file leaves none, and its requests go on."""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.identity.cache.test_retrieval import prompts_of
from tests.system.rig import chaos
from tests.system.rig.chaos import Streams, check_identical, wait_until, wait_until_whole
from tests.system.rig.server import Server, Settings

NUM_TOKENS = 80
PROMPT_LENS = (3200, 3230, 3270, 3300)
TOKEN_BYTES = 2 * 4 * 2 * 2 * 32
"""Keys and values of the tiny model in fp32."""
MEMORY_BYTES = 6_500 * TOKEN_BYTES + 3 * 2**20
"""With what is beside it: two of the prompts do not fit whole."""
# A step takes about 40 ms: requests are still under way when the node is killed.
SLOW: Settings = {
    "latency_us": 5000,
    "deadline_s": 2,
    "restart": True,
}


def num_saved_blocks(client: httpx.Client) -> float:
    """Return how many blocks the engine has written to its file."""
    text = client.get("/metrics").text
    found = re.search(r"^topspin_kv_spill_saved_blocks_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found.group(1))


def links_of_open_files(pid: int, directory: Path) -> set[int]:
    """Return the numbers of names of the files that a process has open in `directory`."""
    return {
        os.stat(each).st_nlink
        for each in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(each).startswith(f"{directory}/")
    }


@pytest.mark.slow
def test_a_node_that_is_killed_while_it_spills_leaves_no_file(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3_moe", max_position_embeddings=8192)
    directory = tmp_path / "spill"
    directory.mkdir()
    prompts = prompts_of(PROMPT_LENS)
    flags = {
        "--kv-cache-memory": f"{MEMORY_BYTES}B",
        "--kv-retrieval-tokens": "64",
        "--kv-spill-dir": f"{directory}:32MiB",
        "--max-num-batched-tokens": "512",
    }
    words = [word for flag in flags.items() for word in flag]
    with (
        Server(model, tmp_path, *words, settings=SLOW) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        streams = Streams(server.url, prompts, NUM_TOKENS)
        wait_until(lambda: num_saved_blocks(client) > 0, "nothing is spilled")
        assert links_of_open_files(server.pids["attention 0"], directory) == {0}
        chaos.kill(server, "attention 0")
        assert not all(each.num_done for each in streams.watched)
        wait_until(lambda: "lost attention 0" in server.output, "not noticed")
        assert not list(directory.iterdir())
        found = streams.join()
        check_identical(found, [each.tokens for each in found])
        assert [len(each.tokens) for each in found] == [NUM_TOKENS] * len(prompts)
        wait_until_whole(server)
        assert links_of_open_files(server.pids["attention 0"], directory) == {0}
    assert not list(directory.iterdir())
