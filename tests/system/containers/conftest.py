"""One image for all tests of containers, in whichever process: the last one removes it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.system.containers.podman import BASE, IMAGE, Podman, why_not

KEPT = "TOPSPIN_CONTAINERS"
"""Names a folder in which images are kept, and found by the next run, whatever has changed."""


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Podman]:
    """The engine, with our image."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    own = tmp_path_factory.getbasetemp()
    kept = os.environ.get(KEPT)
    folder = Path(kept) if kept else (own if worker_id == "master" else own.parent) / "containers"
    folder.mkdir(exist_ok=True)
    with (folder / "users").open("a") as users, (folder / "making").open("a") as making:
        with locked(making):
            fcntl.flock(users, fcntl.LOCK_SH)
            found = Podman(folder)
            if not found.has(BASE) and not found.make_base():
                pytest.skip("no containers here: mmdebstrap brings no base image")
            if not found.has(IMAGE):
                found.build()
        yield found
        with locked(making):
            fcntl.flock(users, fcntl.LOCK_UN)
            if not kept and is_unused(folder / "users"):
                found.remove_all()


@contextmanager
def locked(file: IO[str]) -> Iterator[None]:
    """Have a file to oneself."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def is_unused(file: Path) -> bool:
    """Say whether no process has a file."""
    with file.open("a") as users:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
