"""The perplexity of a text by position."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from benchmarks.quality.positions import FIRST_RANGE, main, perplexities
from tests.checkpoints import make_checkpoint
from tests.system.rig.server import Server


def test_each_range_has_its_own_tokens() -> None:
    scores = [-1.0] * (FIRST_RANGE - 1) + [-2.0] * FIRST_RANGE + [-3.0] * 7
    expected = [
        (0, FIRST_RANGE, math.e),
        (FIRST_RANGE, 2 * FIRST_RANGE, math.exp(2)),
        (2 * FIRST_RANGE, 2 * FIRST_RANGE + 7, math.exp(3)),
    ]
    assert perplexities(scores) == [pytest.approx(each) for each in expected]
    assert perplexities([-1.0, -3.0]) == [pytest.approx((0, 3, math.exp(2)))]


@pytest.mark.slow
def test_a_servers_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_checkpoint(tmp_path / "tiny", "qwen3_moe")
    text = tmp_path / "text"
    text.write_text("the ball is over the net " * 99)
    with Server(path, tmp_path, "--transport", "local") as server:
        assert main([str(text), "--url", server.url, "--num-tokens", "40"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("40 tokens in ")
    [value] = re.findall(r"positions +0 to +40: perplexity ([\d.]+)\n", shown)
    assert float(value) > 1
