"""The monolithic node process, in the parts that a whole engine does not show."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from topspin import local_node
from topspin.local_node import LocalNode


def test_the_thread_that_loads_experts_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its OpenMP helpers would otherwise count for ever, and nobody's would spin."""
    loaders: list[threading.Thread] = []

    def load_experts(path: Path, welcome: Any, index: int) -> str:
        loaders.append(threading.current_thread())
        return f"experts of node {index}"

    monkeypatch.setattr(local_node, "load_experts", load_experts)
    node = LocalNode(address="unused", model_path=Path(), attention_nodes=1, expert_nodes=1)
    assert node._load_experts(None, 3, nullcontext()) == "experts of node 3"  # type: ignore[arg-type]
    [loader] = loaders
    assert loader is not threading.current_thread()
    assert not loader.is_alive()
