"""Recordings of a step's work, replayed instead of being enqueued kernel by kernel.

Owns when a recording is made and when it becomes invalid. The first step of a size runs without
a recording (its kernels are compiled and loaded then, which a recording must not do; so a net
with peers needs no extra step for it), the second is recorded, later ones are replayed. When the
state changes this starts again: other tables have other numbers of experts, and so other
kernels. Knows no layer and no net: a body enqueues everything, always with the same tensors.
Called by both kinds of nodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

import torch

from kernels.runtime import Replay, Runtime

MAX_RECORDED_ROWS: Final = 64
"""Of an attention node's step on CPUs; steps with more spend their time in the kernels."""
SINGLE_ROWS: Final = 8 if torch.cpu._is_avx512_bf16_supported() else 32
"""Up to so many rows of a sequence attend one by one on CPUs: a row takes 5 us at 160 keys, a group
40 us and more. More attend in groups, which a recorded step calls in Python. Without bf16
instructions a group's products are slow: 16 and 32 rows took half of its time one by one."""

Key = TypeVar("Key", bound=Hashable)

_log = logging.getLogger("recordings")


class Recordings(Generic[Key]):
    """One recording per key, all valid for the same `state`; at most `limit`, if given."""

    def __init__(self, runtime: Runtime, limit: int | None = None) -> None:
        """With a `limit`, a new recording replaces the least recently used one."""
        assert limit is None or limit > 0
        self._runtime = runtime
        self._limit = limit
        self._has_run: set[Key] = set()
        self._replays: dict[Key, Replay] = {}
        self._state: object = None

    def __len__(self) -> int:
        return len(self._replays)

    def run(self, key: Key, body: Callable[[], None], state: object) -> None:
        """Enqueue the work of `body`, by the recording for `key` and `state` if there is one.

        Recordings depend on `key` and `state`: when `state` differs from the last call's, all
        are dropped.
        """
        if state != self._state:
            self.clear()
            self._state = state
        replay = self._replays.get(key)
        if replay is None and key not in self._has_run:
            self._has_run.add(key)
            body()
            return
        if replay is None:
            started = time.perf_counter()
            replay = self._replays[key] = self._runtime.capture(body)
            _log.debug("recorded %s in %.2f s", key, time.perf_counter() - started)
            # Recording waited for the device: no dropped recording is still running.
            self._forget_oldest()
        if self._limit is not None:
            self._replays[key] = self._replays.pop(key)
        replay()

    def _forget_oldest(self) -> None:
        # Its kernels stay compiled: the next step of its size is recorded immediately.
        while self._limit is not None and len(self._replays) > self._limit:
            del self._replays[next(iter(self._replays))]

    def drop(self, key: Key) -> None:
        """Forget `key`: its next step is run without a recording."""
        self._replays.pop(key, None)
        self._has_run.discard(key)

    def clear(self) -> None:
        """Drop all recordings, and the memory of which keys have run."""
        self._replays.clear()
        self._has_run.clear()
        self._state = None
