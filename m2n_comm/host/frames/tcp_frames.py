"""One connection's frames in compiled code: read into their windows, or sent.

Owns the words of a connection (`LineWords`): the frame that is partly read, and for each
micro-batch which frame is due, and where its rows go. `read_frame` follows them; a frame that is
complete has its header in its window and the window's flag set to its sequence, as if a peer had
published it there. Whatever is wrong with a header it only notices: tcp.py judges it again and
names the fault.

Used by hops.py in ops, and by tcp.py, which waits.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kernels.cpu.compiled.runtime import Kernel, inlined
from kernels.cpu.simd.lanes import read_i64, write_i64
from kernels.cpu.simd.system import (
    MAY_RETRY,
    WOULD_WAIT,
    now_ns,
    receive_message,
    send_message,
    yield_core,
)
from kernels.frame_header import NUM_WORDS, word
from m2n_comm.host.frames.codes import CODE, add_to_code, begin_code, finish_code, make
from m2n_comm.host.frames.windows import FrameWindow
from m2n_comm.host.frames.wire import HEADER_BYTES, MAX_PARTS, SEAL_AT

if TYPE_CHECKING:
    from m2n_comm.pairing.session import Session

NOTHING, CODED, READ, ENDED, WRONG, FORGED = range(6)
"""What read_frame() has found: no more bytes; a whole frame whose code must be checked; a whole
frame; the end of the connection; a header that must not be followed; a frame with a wrong code. The
last three stay."""

PATIENCE_NS: Final = 200_000
"""How long compiled code looks for more bytes, or for room for them, before Python waits."""

MAX_PATIENCE_NS: Final = 2_000_000
"""The same while bytes pass."""

MAX_FIELDS: Final = 4
MAX_SEGMENTS: Final = 160

(
    _STATE, FOUND, _FD, _HEADER, GOT, SENT, IS_CODED, _NUM_MICRO_BATCHES, _WINDOW_ROWS, _ROW_BYTES,
    _NUM_FIELDS, CURRENT, OURS, _THEIRS, IS_SEALED,
) = range(0, 120, 8)  # fmt: skip
"""The words of a connection. FOUND is what `read_line` has found; GOT how much of a frame has been
read, CURRENT its micro-batch; SENT how much of the newest frame an op has sent; IS_SEALED whether
one has sealed a frame that it has not sent whole. IS_CODED: frames carry codes, which compiled code
makes by the words (codes.py) at OURS and _THEIRS, or (0) Python."""
_FIELD_BYTES: Final = 120
# A struct msghdr, whose third and fourth words are the address and the number of the segments.
_MESSAGE: Final = _FIELD_BYTES + 8 * MAX_FIELDS
_SEGMENTS: Final = _MESSAGE + 56
_BLOCKS: Final = _SEGMENTS + 16 * MAX_SEGMENTS

AWAITS, SEQUENCE, _FLAG, _TO_HEADER, PLACE, PLACE_ROWS, IS_PLACED = range(0, 56, 8)
"""The words of a micro-batch: whether its inbox is free for a frame, the sequence of the newest;
the address PLACE, if not 0, takes the hidden rows of the next frame of at most PLACE_ROWS rows in
place of the window, and IS_PLACED says that it has."""
_FIELDS: Final = 56
_BLOCK_BYTES: Final = _FIELDS + 8 * MAX_FIELDS

_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_AT = {name: 8 * word(name) for name in ("rows", "payload_bytes", "micro_batch", "sequence")}
_ROWS, _SIZE, _MICRO_BATCH, _FRAME_SEQUENCE = _AT.values()
_PART, _NUM_PARTS = 8 * word("part"), 8 * word("num_parts")


def _crc_table() -> np.ndarray:
    """Return the CRC-32 of each byte (the polynomial of zlib)."""
    table = np.arange(256, dtype=np.int64)
    for _ in range(8):
        table = (table >> 1) ^ np.where(table & 1, 0xEDB88320, 0)
    return table


_CRC_TABLE = _crc_table()


class LineWords:
    """The words of one connection, and their address."""

    def __init__(
        self,
        sock: socket.socket,
        inbox: Sequence[FrameWindow],
        *,
        window_rows: int,
        row_bytes: int,
        awaits: bool,
        session: Session | None,
    ) -> None:
        """`awaits`: a frame may come for each micro-batch before one has been sent for it."""
        self.words = array("q", bytes(_BLOCKS + _BLOCK_BYTES * len(inbox)))
        self.header = array("Q", bytes(HEADER_BYTES))
        self.address: int = self.words.buffer_info()[0]
        self[_FD], self[_HEADER] = sock.fileno(), self.header.buffer_info()[0]
        self[IS_CODED], self[_NUM_MICRO_BATCHES] = session is not None, len(inbox)
        self._codes = () if session is None else (make(session.ours), make(session.theirs))
        for offset, codes in zip((OURS, _THEIRS), self._codes, strict=False):
            self[offset] = 0 if codes is None else codes.address
        self[_WINDOW_ROWS], self[_ROW_BYTES] = window_rows, row_bytes
        self[_MESSAGE + 16] = self.address + _SEGMENTS
        for micro_batch, window in enumerate(inbox):
            block = self.block(micro_batch) - self.address
            self[block + AWAITS] = awaits
            self[block + _FLAG], self[block + _TO_HEADER] = window.flag_at, window.header_at
            self[_NUM_FIELDS] = len(window.fields)
            for position, field in enumerate(window.fields):
                self[_FIELD_BYTES + 8 * position] = field.row_bytes
                self[block + _FIELDS + 8 * position] = field.address

    def __getitem__(self, offset: int) -> int:
        return self.words[offset // 8]

    def __setitem__(self, offset: int, number: int) -> None:
        self.words[offset // 8] = number

    def block(self, micro_batch: int) -> int:
        """Return the address of a micro-batch's words."""
        return self.address + _BLOCKS + _BLOCK_BYTES * micro_batch

    def of(self, micro_batch: int, offset: int) -> int:
        """Return a word of a micro-batch."""
        return self[_BLOCKS + _BLOCK_BYTES * micro_batch + offset]

    def await_answer(self, micro_batch: int) -> None:
        """Let a frame of a micro-batch come."""
        self[_BLOCKS + _BLOCK_BYTES * micro_batch + AWAITS] = 1


@inlined
def _crc(address: int, num_words: int) -> int:
    crc = 0xFFFFFFFF
    for idx in range(num_words):
        number = read_i64(address + 8 * idx)
        for _ in range(8):
            crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ number) & 0xFF]
            number >>= 8
    return crc ^ 0xFFFFFFFF


@inlined
def _block_of(line: int, micro_batch: int) -> int:
    return line + _BLOCKS + _BLOCK_BYTES * micro_batch


@inlined
def _is_due(line: int, header: int) -> bool:
    """Return whether a frame with this header may be read into its window now."""
    if not read_i64(line + IS_CODED):
        is_whole = read_i64(header + SEAL_AT) == _crc(header, SEAL_AT // 8)
        if not is_whole or read_i64(header + SEAL_AT + 8) != 0:
            return False
    micro_batch, rows = read_i64(header + _MICRO_BATCH), read_i64(header + _ROWS)
    part, num_parts = read_i64(header + _PART), read_i64(header + _NUM_PARTS)
    if micro_batch < 0 or micro_batch >= read_i64(line + _NUM_MICRO_BATCHES):
        return False
    if rows < 0 or rows > read_i64(line + _WINDOW_ROWS):
        return False
    block = _block_of(line, micro_batch)
    is_sound = 0 <= part < num_parts <= MAX_PARTS
    is_sound &= read_i64(header + _SIZE) == rows * read_i64(line + _ROW_BYTES)
    is_next = read_i64(header + _FRAME_SEQUENCE) == read_i64(block + SEQUENCE) + 1
    return is_sound and is_next and bool(read_i64(block + AWAITS))


@inlined
def _begin(line: int, header: int) -> None:
    """Note where the rows of a frame with this header go."""
    micro_batch = read_i64(header + _MICRO_BATCH)
    block = _block_of(line, micro_batch)
    has_place = read_i64(block + PLACE) != 0
    is_placed = has_place and read_i64(header + _ROWS) <= read_i64(block + PLACE_ROWS)
    write_i64(block + IS_PLACED, is_placed)
    write_i64(line + CURRENT, micro_batch)


@inlined
def add_segment(line: int, count: int, address: int, size: int) -> int:
    """Name bytes that are the next of a message, after `count` others; returns the new count."""
    write_i64(line + _SEGMENTS + 16 * count, address)
    write_i64(line + _SEGMENTS + 16 * count + 8, size)
    return count + 1


@inlined
def _rest_of_rows(line: int, header: int, done: int) -> int:
    """Make segments of a frame's payload after `done` bytes; returns their number."""
    block = _block_of(line, read_i64(line + CURRENT))
    rows, num_fields = read_i64(header + _ROWS), read_i64(line + _NUM_FIELDS)
    count = 0
    for position in range(num_fields):
        address = read_i64(block + _FIELDS + 8 * position)
        if position == num_fields - 1 and read_i64(block + IS_PLACED):
            address = read_i64(block + PLACE)
        size = rows * read_i64(line + _FIELD_BYTES + 8 * position)
        if done < size:
            count = add_segment(line, count, address + done, size - done)
            done = 0
        else:
            done -= size
    return count


@inlined
def _accept(line: int) -> None:
    """Publish the frame that is complete."""
    header, block = read_i64(line + _HEADER), _block_of(line, read_i64(line + CURRENT))
    sequence, to_header = read_i64(header + _FRAME_SEQUENCE), read_i64(block + _TO_HEADER)
    write_i64(block + AWAITS, 0)
    write_i64(block + SEQUENCE, sequence)
    write_i64(block + PLACE, 0)
    for idx in range(NUM_WORDS):
        write_i64(to_header + 8 * idx, read_i64(header + 8 * idx))
    write_i64(line + GOT, 0)
    write_i64(line + _STATE, NOTHING)
    write_i64(read_i64(block + _FLAG), sequence)


@inlined
def _code(codes: int, line: int, header: int, first: int, count: int) -> None:
    """Make the next code: of a frame's header, and of the segments from `first` on."""
    begin_code(codes)
    add_to_code(codes, header, SEAL_AT)
    for idx in range(first, count):
        segment = line + _SEGMENTS + 16 * idx
        add_to_code(codes, read_i64(segment), read_i64(segment + 8))
    finish_code(codes)


@inlined
def seal_frame(line: int, header: int, count: int) -> None:
    """Seal the frame that the segments are, its header first: wire.seal's checksum, or a code."""
    codes = read_i64(line + OURS)
    if codes:
        _code(codes, line, header, 1, count)
        write_i64(header + SEAL_AT, read_i64(codes + CODE))
        write_i64(header + SEAL_AT + 8, read_i64(codes + CODE + 8))
    else:
        write_i64(header + SEAL_AT, _crc(header, SEAL_AT // 8))
        write_i64(header + SEAL_AT + 8, 0)


@inlined
def _is_genuine(line: int, header: int) -> bool:
    """Return whether the code of the frame that is complete is the next one."""
    codes = read_i64(line + _THEIRS)
    _code(codes, line, header, 0, _rest_of_rows(line, header, 0))
    low = read_i64(codes + CODE) ^ read_i64(header + SEAL_AT)
    high = read_i64(codes + CODE + 8) ^ read_i64(header + SEAL_AT + 8)
    return bool((low | high) == 0)


@inlined
def send_segments(line: int, count: int) -> bool:
    """Send the first `count` segments; returns whether all their bytes went, else see SENT."""
    size = 0
    for idx in range(count):
        size += read_i64(line + _SEGMENTS + 16 * idx + 8)
    began_ns = now_ns()
    sent, first, until_ns = 0, 0, began_ns + PATIENCE_NS
    while sent < size:
        write_i64(line + _MESSAGE + 16, line + _SEGMENTS + 16 * first)
        write_i64(line + _MESSAGE + 24, count - first)
        passed = send_message(read_i64(line + _FD), line + _MESSAGE, _FLAGS)
        if passed > 0:
            sent += passed
            until_ns = min(now_ns() + PATIENCE_NS, began_ns + MAX_PATIENCE_NS)
            while first < count and passed >= read_i64(line + _SEGMENTS + 16 * first + 8):
                passed -= read_i64(line + _SEGMENTS + 16 * first + 8)
                first += 1
            place = line + _SEGMENTS + 16 * first
            write_i64(place, read_i64(place) + passed)
            write_i64(place + 8, read_i64(place + 8) - passed)
        elif passed == WOULD_WAIT and now_ns() < until_ns:
            yield_core()
        elif passed != MAY_RETRY:
            break
    write_i64(line + _MESSAGE + 16, line + _SEGMENTS)
    write_i64(line + SENT, 0 if sent == size else sent)
    write_i64(line + IS_SEALED, sent != size)
    return sent == size


@inlined
def read_frame(line: int) -> int:
    """Read what has come, up to the end of one frame; see NOTHING to WRONG. Never waits."""
    header = read_i64(line + _HEADER)
    state: int = read_i64(line + _STATE)
    while state == NOTHING:
        got = read_i64(line + GOT)
        left = HEADER_BYTES - got
        if left > 0:
            count = add_segment(line, 0, header + got, left)
        else:
            count = _rest_of_rows(line, header, -left)
        taken = 0
        if count > 0:
            write_i64(line + _MESSAGE + 24, count)
            taken = receive_message(read_i64(line + _FD), line + _MESSAGE, _FLAGS)
            if taken == WOULD_WAIT:
                return NOTHING
            if taken == MAY_RETRY:
                continue
            if taken <= 0:
                state = ENDED
                break
        got += taken
        write_i64(line + GOT, got)
        if got == HEADER_BYTES and taken > 0:
            if not _is_due(line, header):
                state = WRONG
                break
            _begin(line, header)
        if got >= HEADER_BYTES and got == HEADER_BYTES + read_i64(header + _SIZE):
            if read_i64(line + IS_CODED):
                state = CODED
                if read_i64(line + _THEIRS):
                    state = NOTHING if _is_genuine(line, header) else FORGED
                if state != NOTHING:
                    break
            _accept(line)
            return READ
    write_i64(line + _STATE, state)
    return state


@Kernel
def read_line(line: int) -> None:
    """Do read_frame(), for callers in Python."""
    write_i64(line + FOUND, read_frame(line))


@Kernel
def accept_frame(line: int) -> None:
    """Publish a frame whose code is right."""
    _accept(line)
