"""Runs work in a fork of this process and returns its result.

Owns the pipe and the end of the child. A child shares the weights that its parent has made; the
parent must have started no threads (OpenMP's would be missing in the child). Called by whoever
measures the nodes of a rig.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import TypeVar

import msgspec

from topspin.errors import TopspinError

Result = TypeVar("Result")


class ForkError(TopspinError):
    """A measurement ended without a result."""


def fork(work: Callable[[], Result], kind: type[Result]) -> Callable[[], Result]:
    """Start `work` in a child process; return a function that waits for its result.

    The result travels as JSON and is read as `kind`. Raises ForkError there with the words of the
    error that ended the child, which has printed where it was raised.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as file:
                try:
                    file.write(msgspec.json.encode(work()))
                    status = 0
                except BaseException as error:
                    traceback.print_exc()
                    file.write(f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(status)
    os.close(writer)

    def wait() -> Result:
        with os.fdopen(reader, "rb") as file:
            text = file.read()
        _, status = os.waitpid(child, 0)
        if status:
            raise ForkError(text.decode() or "a measuring process ended without a word")
        return msgspec.json.decode(text, type=kind)

    return wait
