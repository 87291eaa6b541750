"""Compose files, run: processes in containers of their own answer as transformers does."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.system.conftest import Tiny
from tests.system.containers.compose import Composed, needs_compose
from tests.system.containers.files import HEADERS, make_keys, models_of, render
from tests.system.containers.podman import Podman
from tests.system.rig.streams import NUM_STREAMS, Load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400), needs_compose]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_services_answer_outlive_a_loss_and_leave_nothing(
    transport: str, podman: Podman, tiny: Tiny, tmp_path: Path
) -> None:
    models = models_of(tiny.path, tmp_path)
    out = render(models / "tiny", tmp_path, models, transport=transport, form="compose")
    make_keys(out)
    with Composed(podman, out) as engine:
        engine.wait_until_healthy()
        assert httpx.get(f"{engine.url}/v1/models").status_code == 401
        with Load([engine.url], tiny, headers=HEADERS) as load:
            load.wait_for(2 * NUM_STREAMS)
            engine.kill("expert-0")
            load.wait_for(2 * NUM_STREAMS)
        assert load.wrong == []
        assert engine.state("expert-0")["RestartCount"] == 1
    for left in (("ps", "--all"), ("pod", "ls"), ("volume", "ls")):
        assert podman(*left, "--quiet") == ""
    assert "topspin" not in podman("network", "ls")
