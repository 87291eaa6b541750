"""Real processes whose nodes compute on a device, and nodes that find no device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.engine import engine_config
from tests.system.conftest import Tiny
from tests.system.rig import chaos
from tests.system.rig.chaos import Streams, check_identical, wait_until_whole
from tests.system.rig.server import Server, plan_flags
from tests.system.test_serve import complete
from tests.system.test_speculation import accepted
from topspin.plan.speculation import Speculation

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

# Interpreted kernels are slow: few tokens, and few sizes of steps to record.
NUM_TOKENS = 3
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
SHARED = ("--layout", "shared")
INTERPRETED = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
SMALL = (
    *("--attention-device", DEVICE, "--expert-device", DEVICE),
    *("--max-num-seqs", "2", "--max-num-batched-tokens", "32"),
)
TRITON = {"kernels": "triton"}


# Interpreted, a start takes many seconds: tests/identity/test_devices.py has threads.
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--max-num-seqs", "1"), id="one process"),
        pytest.param(("--transport", "shm", "--expert-nodes", "2"), id="staged, three processes"),
        pytest.param(
            ("--transport", "cuda_ipc", "--max-num-seqs", "1"), id="cuda_ipc, two processes"
        ),
        pytest.param(
            ("--transport", "cuda_ipc", "--expert-nodes", "2", "--micro-batches", "2"),
            id="cuda_ipc, three processes",
        ),
    ],
)
def test_devices_serve_transformers_tokens(
    tiny: Tiny, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with Server(tiny.path, tmp_path, *SMALL, *flags, env=INTERPRETED, settings=TRITON) as server:
        tokens = complete(server.url, tiny.prompts[0], max_tokens=NUM_TOKENS)
        assert tokens == tiny.tokens[0][:NUM_TOKENS]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["attention", "draft"])
def test_a_draft_model_on_a_device(tiny: Tiny, tmp_path: Path, role: str) -> None:
    """Beside attention, or on a node of its own; all else is on the CPU."""
    plan = engine_config(
        tiny.path,
        transport="shm",
        max_num_seqs=2,
        speculation=Speculation(
            method="draft_model", model=str(tiny.path), branches=True, adaptive=False
        ),
        draft_nodes=1 if role == "draft" else 0,
        # Interpreted drafts take longer than any device's on a busy machine.
        progress_deadline_s=110.0,
    )
    nodes = [
        replace(node, device=DEVICE, kernels="triton") if node.role == role else node
        for node in plan.nodes
    ]
    plan = replace(plan, nodes=tuple(nodes))
    with Server(tiny.path, tmp_path, plan=plan, env=INTERPRETED) as server:
        tokens = complete(server.url, tiny.prompts[0], max_tokens=2 * NUM_TOKENS)
        assert tokens == tiny.tokens[0][: 2 * NUM_TOKENS]
        assert role == "draft" or accepted(server) > 0


def serve(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run `topspin serve` until it ends by itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, "-m", "topspin", "serve", "--port", "0", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("flags", "device"),
    [
        pytest.param(("--attention-device", "cuda"), "cuda:0", marks=pytest.mark.slow),
        pytest.param(("--expert-device", "cuda:3"), "cuda:3", marks=pytest.mark.slow),
        (("--attention-device", "cuda", "--expert-device", "cuda"), "cuda:0"),
    ],
    ids=["attention", "experts", "both"],
)
def test_without_the_gpu_nothing_starts_and_one_line_says_why(
    tiny: Tiny, flags: tuple[str, ...], device: str
) -> None:
    ended = serve(str(tiny.path), *SHARED, *flags)
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"topspin serve: error: device {device}: ")


@pytest.mark.slow
def test_a_device_that_only_the_nodes_find_wrong_ends_the_start_with_status_2(
    tiny: Tiny, tmp_path: Path
) -> None:
    flags = plan_flags(tmp_path, TRITON, str(tiny.path), *SHARED)
    ended = serve(*flags)
    assert ended.returncode == 2, ended.stderr
    assert "kernels triton on the CPU: they are for GPUs" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "role"),
    [("cuda_ipc", "expert 0"), ("cuda_ipc", "attention 0"), ("local", "local")],
)
def test_streams_survive_a_killed_node_whose_memory_others_write(
    tiny: Tiny, tmp_path: Path, transport: str, role: str
) -> None:
    num_tokens = 8
    flags = (*SMALL, "--transport", transport, "--restart", "on", "--restart-deadline", "120")
    with Server(tiny.path, tmp_path, *flags, env=INTERPRETED, settings=TRITON) as server:
        streams = Streams(server.url, tiny.prompts[:1], num_tokens)
        streams.wait_for_events(2)
        chaos.kill(server, role)
        check_identical(streams.join(), [tiny.tokens[0][:num_tokens]])
        assert f"{role} was killed by SIGKILL" in server.output.replace("local node", "local")
        wait_until_whole(server)
