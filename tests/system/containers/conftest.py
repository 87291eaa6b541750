"""One image for all tests of containers, of whichever process: the last one removes it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.system.containers.podman import BASE, IMAGE, Podman, why_not


@contextmanager
def locked(file: IO[str]) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield
    fcntl.flock(file, fcntl.LOCK_UN)


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Podman]:
    """The engine, with our image."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    shared = tmp_path_factory.getbasetemp()
    shared = shared if worker_id == "master" else shared.parent
    with (shared / "users").open("a") as users, (shared / "building").open("a") as building:
        with locked(building):
            fcntl.flock(users, fcntl.LOCK_SH)
            found = Podman(shared / "containers")
            if not found.has(BASE) and not found.make_base():
                pytest.skip("no containers here: mmdebstrap brings no base image")
            if not found.has(IMAGE):
                found.build()
        try:
            yield found
        finally:
            with locked(building):
                fcntl.flock(users, fcntl.LOCK_UN)
                if is_last(shared / "users"):
                    found.remove_all()


def is_last(file: Path) -> bool:
    """Say whether no process uses the engine any more."""
    with file.open("a") as users:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
