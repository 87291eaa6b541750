"""`topspin serve` with a GGUF file instead of a checkpoint's directory."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.gguf_files import write_gguf
from tests.system.conftest import NUM_TOKENS, Tiny
from tests.system.rig.chaos import Streams, check_identical
from tests.system.rig.server import Server


@pytest.mark.slow
def test_processes_serve_the_tokens_of_a_file(tiny: Tiny, tmp_path: Path) -> None:
    file = write_gguf(tiny.path, tmp_path / "tiny.gguf", Kind.F32)
    flags = ("--transport", "shm", "--dtype", "float32")
    with Server(file, tmp_path, *flags, env={"TOPSPIN_CACHE": str(tmp_path / "cache")}) as server:
        check_identical(Streams(server.url, tiny.prompts, NUM_TOKENS).join(), tiny.tokens)
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["root"] == str(file)
