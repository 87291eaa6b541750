"""One image for all tests of containers, which take turns: they name what they start alike."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.system.containers.podman import BASE, IMAGE, Podman, why_not

KEPT = "TOPSPIN_CONTAINERS"
"""Names a folder in which images are kept, and found by the next run, whatever has changed."""


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Path]:
    """A folder for containers, of all processes that run tests; the last one removes it."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    own, kept = tmp_path_factory.getbasetemp(), os.environ.get(KEPT)
    folder = Path(kept) if kept else (own if worker_id == "master" else own.parent) / "containers"
    folder.mkdir(exist_ok=True)
    with (folder / "users").open("a") as users, suppress(BlockingIOError):
        fcntl.flock(users, fcntl.LOCK_SH)
        yield folder
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else has it
        if not kept:
            Podman(folder).remove_all()


@pytest.fixture
def podman(storage: Path) -> Iterator[Podman]:
    """The engine, with our image and without anything else that runs."""
    with (storage / "turn").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        found = Podman(storage)
        if not found.has(BASE) and not found.make_base():
            pytest.skip("no containers here: mmdebstrap brings no base image")
        if not found.has(IMAGE):
            found.build()
        yield found
