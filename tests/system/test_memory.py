"""The memory of real nodes under mixed load: once they are warm it hardly grows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.checkpoints import make_checkpoint
from tests.system.rig.server import Server

MOST_SEQS = 48
LONGEST_PROMPT, LONGEST_OUTPUT = 200, 40
NUM_WARM_UP, NUM_BURSTS = 10, 30
# A step's logits alone are up to 6 MB; there are as many numbers of rows as sequences.
VOCAB_SIZE = 32768
MIB = 2**20
MOST_GROWTH = 64 * MIB
"""Pieces of the heap, and code of other numbers of rows; memory for each of these was 160 MiB."""


def ask(url: str, lengths: list[tuple[int, int]], random: Random) -> None:
    """Send a completion for each prompt length and output length at once; wait for all."""
    bodies: list[dict[str, Any]] = [
        {
            "model": "tiny",
            "prompt": [random.randrange(250) for _ in range(num_prompt)],
            "max_tokens": num_output,
            "ignore_eos": True,
            "seed": 1,
        }
        for num_prompt, num_output in lengths
    ]
    with httpx.Client(timeout=120) as client, ThreadPoolExecutor(len(bodies)) as pool:
        answers = pool.map(lambda body: client.post(f"{url}/v1/completions", json=body), bodies)
        assert [answer.status_code for answer in answers] == [200] * len(bodies)


def told_bytes(url: str) -> dict[str, float]:
    """Return each node's memory as /metrics has it."""
    text = httpx.get(f"{url}/metrics").text
    return {
        f"{sample.labels['role']} {sample.labels['index']}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "topspin_node_resident_bytes"
    }


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def ask_often(url: str, num_bursts: int, random: Random) -> None:
    """Send bursts of requests of random lengths, one burst after the other."""
    for _ in range(num_bursts):
        lengths = [
            (random.randint(1, LONGEST_PROMPT), random.randint(2, LONGEST_OUTPUT))
            for _ in range(random.randint(1, MOST_SEQS))
        ]
        ask(url, lengths, random)


@pytest.mark.slow
def test_warm_nodes_do_not_grow_and_tell_their_memory(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "qwen3_moe", vocab_size=VOCAB_SIZE)
    flags = ("--dtype", "bfloat16", "--max-num-seqs", str(MOST_SEQS))
    random = Random(0)
    with Server(path, tmp_path, *flags) as server:
        nodes = ("attention 0", "expert 0")
        for _ in range(3):
            ask(server.url, [(LONGEST_PROMPT, LONGEST_OUTPUT)] * MOST_SEQS, random)
        ask_often(server.url, NUM_WARM_UP, random)
        warm = {node: resident_bytes(server.pids[node]) for node in nodes}
        ask_often(server.url, NUM_BURSTS, random)
        told = told_bytes(server.url)
        assert told.keys() == set(nodes)
        for node, before in warm.items():
            now = resident_bytes(server.pids[node])
            assert now <= before + MOST_GROWTH, f"{node}: {before // MIB} -> {now // MIB} MiB"
            assert abs(told[node] - now) <= 16 * MIB, f"{node}: {told[node]}, has {now}"
