"""Messages between an attention node, its fork server, and the processes of grammars.

Owns their fields and framing. Node and fork server speak over a socket that keeps messages apart
(a Fork comes with two file descriptors: the process's end of its connection, and a file with the
grammar's text); node and process over a stream, each message behind its length. Knows no grammar.
"""

from __future__ import annotations

import socket
import struct
from typing import Final, TypeVar

import msgspec

OUT_OF_MEMORY_STATUS: Final = 3
"""The exit status of a process whose memory has been refused."""

_LENGTH: Final = struct.Struct("<I")


class VocabularyRead(msgspec.Struct, frozen=True, tag=True):
    """The fork server has read the vocabulary: a mask has `num_words` i32. `error`: it cannot."""

    num_words: int = 0
    error: str = ""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Start process `number` for a grammar, within limits of its compilation and its memory."""

    number: int
    compile_cpu_s: float
    max_bytes: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Process `number` has ended: by `signal` (0: none), with exit status `status`.

    `is_largest`: the fork server ended it, since all of them together took too much memory.
    `error`: it could not be started.
    """

    number: int
    signal: int = 0
    status: int = 0
    is_largest: bool = False
    error: str = ""


class Compiled(msgspec.Struct, frozen=True):
    """A process has compiled its grammar, or says in `error` why not.

    It holds `held_bytes` of memory of its own; `pid` is its number in the kernel.
    """

    pid: int
    held_bytes: int
    error: str = ""


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """What a sequence asks of its matcher: consume `tokens`, then masks.

    A number that is new is that of a new matcher. Of a draft, `parents` has the index of the token
    before each (-1: none); its masks are those behind each token that the grammar allows there.
    """

    matcher: int
    tokens: list[int]
    draft: list[int] = []
    parents: list[int] = []


class Follow(msgspec.Struct, frozen=True):
    """A step's slices. Matchers that are `closed` are forgotten; without slices no answer comes."""

    slices: list[Slice] = []
    closed: list[int] = []


class FollowedSlice(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a slice: why it cannot go on, or `rows` with masks.

    0 is the row behind the sequence's last token, 1 + i the one behind token i of its draft. None:
    the grammar's text has ended.
    """

    error: str = ""
    rows: list[int] = []


class Masks(msgspec.Struct, frozen=True):
    """The answer to Follow, by slice; all rows' masks, in order, come behind it as raw bytes."""

    answers: list[FollowedSlice]
    held_bytes: int


_Frame = TypeVar("_Frame", Compiled, Follow, Masks)


def framed(frame: Compiled | Follow | Masks) -> bytes:
    """Return a message of the stream, behind its length."""
    data = msgspec.msgpack.encode(frame)
    return _LENGTH.pack(len(data)) + data


def receive(connection: socket.socket, kind: type[_Frame]) -> _Frame:
    """Return the next message of the stream; raises EOFError at its end."""
    (length,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size))
    return msgspec.msgpack.decode(receive_bytes(connection, length), type=kind)


def receive_bytes(connection: socket.socket, size: int) -> bytearray:
    """Return `size` bytes; raises EOFError if the stream ends before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data
