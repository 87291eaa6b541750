"""Threads that prepare large requests and answers, and the release of the memory used for them.

Owns the threads and keeps their effect on the event loop small. Knows nothing about requests;
server.gateway.handler decodes, renders and tokenises large bodies here, and encodes large answers.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from topspin.process import release_freed_memory

# The upper limit; at most half of the cores are used, the others serve running streams.
MAX_THREADS = 4
# The delay after the last large request before freed memory is returned to the system.
TRIM_DELAY_S = 1.0

_Result = TypeVar("_Result")


class PreparationThreads:
    """Runs work in threads for one event loop; used from that loop only."""

    def __init__(self) -> None:
        num_threads = min(MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // 2))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prepare")
        self._num_running = 0
        self._trim: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Call `work` in a thread and return its result.

        Cyclic garbage collection is off meanwhile: a large body makes a million objects, and
        each collection would hold the interpreter for tens of milliseconds.
        """
        loop = asyncio.get_running_loop()
        self._num_running += 1
        gc.disable()
        try:
            return await loop.run_in_executor(self._pool, work)
        finally:
            self._num_running -= 1
            if not self._num_running:
                gc.enable()
                if self._trim is not None:
                    self._trim.cancel()
                self._trim = loop.call_later(TRIM_DELAY_S, self._give_memory_back)

    def _give_memory_back(self) -> None:
        self._trim = None
        if not self._num_running:
            self._pool.submit(release_freed_memory)
