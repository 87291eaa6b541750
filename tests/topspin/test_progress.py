"""A long step is reported now and then from within; a short one, or a hung one, never."""

from __future__ import annotations

from typing import Any

import pytest

from tests.m2n_comm.harness import make_ticket
from topspin.messages import Progress
from topspin.progress import INTERVAL_S, StepProgress


class FakeControl:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Progress] = []

    def send(self, message: Progress) -> None:
        self.sent.append(message)


def test_one_message_per_interval_and_none_for_short_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr("topspin.progress.time.monotonic", lambda: now_s)
    control: Any = FakeControl()
    progress = StepProgress(control, role="expert", index=3)
    for step in range(1, 50):  # long in all, each of them short
        progress.begin(make_ticket(step))
        now_s += INTERVAL_S * 0.9
        progress.beat()
    assert control.sent == []
    progress.begin(make_ticket(50))
    for _ in range(40):
        now_s += INTERVAL_S / 4
        progress.beat()
    assert control.sent == [Progress(step=50, generation=1, role="expert", index=3)] * 10
