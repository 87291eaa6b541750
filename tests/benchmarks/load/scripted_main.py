"""The scripted server as a program: `python -m ... NAME PORT JOURNAL [DIE_AT]`.

Writes "start NAME" and "stop NAME" into JOURNAL, so that a test sees which server ran when. With
DIE_AT it ends, with status 7, after DIE_AT requests.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.benchmarks.load.scripted_server import Received, Reply, ScriptedServer, stream_reply


def main(name: str, port: int, journal: Path, die_at: int | None) -> None:
    """Serve until SIGTERM."""
    # Blocked before any thread starts, so that only the wait below receives it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def respond(received: Received) -> Reply:
        if die_at is not None and len(server.requests) >= die_at:
            print("out of memory", flush=True)
            os._exit(7)
        return stream_reply(received)

    with ScriptedServer(respond, port=port) as server:
        _note(journal, f"start {name}")
        signal.sigwait({signal.SIGTERM})
        _note(journal, f"stop {name}")


def _note(journal: Path, line: str) -> None:
    with journal.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:5] or [10**9]))
