"""How a node's process ends: its exit status, and what it tells the scheduler before."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator

import pytest

from topspin.channel import ControlClient, ControlServer, Received
from topspin.errors import CheckpointError, ConfigError, FrameError, PeerLost
from topspin.messages import Goodbye
from topspin.node_life import Stopped, run_node

TIMEOUT_S = 30.0


@pytest.fixture
def address() -> str:
    return f"ipc://@topspin-test-{secrets.token_hex(8)}"


@pytest.fixture
def scheduler(address: str) -> Iterator[ControlServer]:
    server = ControlServer(address)
    yield server
    server.close()


def end_with(error: Exception, address: str) -> int:
    def body(control: ControlClient) -> None:
        raise error

    return run_node("expert", 3, address, logger=logging.getLogger("expert"), body=body)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ConfigError("no such dtype"), 2, "invalid_config"),
        (CheckpointError("tensor x is missing"), 2, "invalid_checkpoint"),
        (FrameError("a bad frame"), 1, "frame_error"),
        (ZeroDivisionError("a bug"), 1, "internal_error"),
    ],
)
def test_an_error_is_told_and_is_the_exit_status(
    address: str, scheduler: ControlServer, error: Exception, status: int, code: str
) -> None:
    assert end_with(error, address) == status
    events = scheduler.poll(TIMEOUT_S)
    assert isinstance(events[0], Received)
    goodbye = events[0].message
    assert isinstance(goodbye, Goodbye)
    assert (goodbye.role, goodbye.index, goodbye.code) == ("expert", 3, code)
    assert str(error) in goodbye.message


@pytest.mark.parametrize(("error", "status"), [(Stopped("over"), 0), (PeerLost("gone"), 1)])
def test_an_end_that_the_scheduler_knows_is_not_told(
    address: str, error: Exception, status: int
) -> None:
    assert end_with(error, address) == status
