"""Shared by the tests of kernels: where Triton's run, a seed before each, and torch's threads.

Triton's kernels are interpreted without a GPU, as part of `make test`; with one they run there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TRITON = Path(__file__).parent / "triton"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            callspec = getattr(item, "callspec", None)
            is_named = callspec is not None and "triton" in callspec.params.values()
            if is_named or TRITON in item.path.parents:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seeded_and_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
