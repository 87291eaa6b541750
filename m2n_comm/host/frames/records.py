"""The words of a (pair, micro-batch) at one end, which compiled code works on.

Owns their order and what is in them before the first frame. Knows no frame; native.py and hops.py
read and write the words.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import NamedTuple

import torch

from kernels.frame_header import NUM_WORDS, word
from m2n_comm.emulate import LinkShaper
from m2n_comm.host.frames.tcp_frames import IS_PLACED
from m2n_comm.host.frames.windows import FrameWindow, PairLayout
from m2n_comm.host.frames.wire import REQUEST, payload_code
from m2n_comm.net import NetShape

# A record: the header of the newest request, then words that do not change, then (from CHOSEN_ROWS
# on) those of the newest frames. OUT_FLAG to BLOCK are the port's, 0 without one; SHAPER is the
# address of an emulated link's words (0: none), SELF the record's own address, COUNT the address of
# the number of requests sent or taken.
ROWS, NUM_PARTS, EXPERT = map(word, ("rows", "num_parts", "expert"))
(
    OUT_HEADER,
    OUT_SLOTS,
    OUT_WEIGHTS,
    OUT_HIDDEN,
    IN_HEADER,
    IN_SLOTS,
    IN_WEIGHTS,
    IN_HIDDEN,
    CHOSEN,
    TOP_K,
    WINDOW_ROWS,
    ROW_BYTES,
    REQUEST_ROW_BYTES,
    ANSWER_ROW_BYTES,
    ANSWER_PAYLOAD,
    IS_BF16,
    IS_PLAIN,
    PER_CHOICE,
    SENDS_ALL,
    RUNS_AT,
    OUT_FLAG,
    OUT_IS_AWAKE,
    BELL,
    IN_FLAG,
    IN_IS_AWAKE,
    CONSUMED,
    LINE,
    BLOCK,
    SHAPER,
    SELF,
    COUNT,
    ANSWER_ROWS,
    FIRST_ROW,
    NEXT_ROW,
    NUM_RUNS,
    NUM_ADDED,
    SENT_NS,
    WAIT_BEGAN_NS,
    ARRIVED_NS,
    RECORD_WORDS,
) = range(NUM_WORDS, NUM_WORDS + 40)
MAX_RUNS = 128


class FramePort(NamedTuple):
    """One micro-batch's windows of a pair, for compiled code: addresses of 64-bit words.

    The flags of outbox and inbox, whether their readers are awake, and the sequence consumed last;
    `bell` is the eventfd that wakes the peer. All 0: Python publishes and waits. Frames on a
    connection have its words (tcp_frames.LineWords) at `line`, those of the micro-batch at `block`,
    and neither flag of the outbox nor bell.
    """

    out_flag: int = 0
    out_is_awake: int = 0
    bell: int = 0
    in_flag: int = 0
    in_is_awake: int = 0
    consumed: int = 0
    line: int = 0
    block: int = 0


class Record:
    """The words of one (pair, micro-batch) at one end, and their address.

    `chosen` i32[W] are the newest request's rows, by their numbers in the dispatch.

    IS_PLAIN: requests' rows travel as they are. PER_CHOICE: an answer has a row of each choice.
    Of the newest request, ANSWER_ROWS is the number of rows of its answer, and FIRST_ROW and
    NEXT_ROW the first row of the dispatch that its part covers, and the end; NUM_RUNS are the runs
    in which its rows lie (0: they are in the outbox). NUM_ADDED counts rows of its answer.
    """

    __slots__ = ("_count", "_runs", "_shaper", "address", "chosen", "words")

    def __init__(
        self,
        layout: PairLayout,
        header: tuple[int, int, int],
        incarnations: tuple[int, int],
        *,
        outbox: FrameWindow,
        inbox: FrameWindow,
        count: array[int],
        port: FramePort | None = None,
        shaper: LinkShaper | None = None,
        sends_all: bool = False,
        in_place: bool = False,
    ) -> None:
        """`header` is (attention, expert, micro-batch); `incarnations` is (own, peer's).

        `count[micro_batch]` is the number of requests sent or taken. `sends_all`: all rows go to
        this expert node, even if they chose no expert there. `in_place`: hidden rows need not be
        written into the outbox if they lie in few `runs` where they are.
        """
        shape = layout.shape
        self.words = array("Q", bytes(8 * RECORD_WORDS))
        self.chosen = torch.zeros(shape.window_rows, dtype=torch.int32)
        self._runs = array("i", bytes(8 * MAX_RUNS))
        words = self.words
        for name, value in zip(("attention", "expert", "micro_batch"), header, strict=True):
            words[word(name)] = value
        writer, reader = incarnations if outbox.slots is not None else incarnations[::-1]
        words[word("incarnation")], words[word("reader_incarnation")] = writer, reader
        words[word("kind")], words[word("payload")] = REQUEST, payload_code(shape.request_dtype)
        words[word("hidden_size")] = shape.hidden_size
        for window, first in ((outbox, OUT_HEADER), (inbox, IN_HEADER)):
            tensors = (window.slots, window.weights, window.hidden)
            addresses = [0 if each is None else each.data_ptr() for each in tensors]
            words[first : first + 4] = array("Q", (window.header_at, *addresses))
        words[CHOSEN] = self.chosen.data_ptr()
        words[RUNS_AT] = self._runs.buffer_info()[0] if in_place else 0
        words[TOP_K] = shape.top_k
        words[WINDOW_ROWS] = shape.window_rows
        words[ROW_BYTES] = shape.hidden_size * shape.payload.itemsize
        words[REQUEST_ROW_BYTES] = layout.request_row_bytes
        words[ANSWER_ROW_BYTES] = layout.answer_row_bytes
        words[ANSWER_PAYLOAD] = payload_code(shape.payload)
        words[IS_BF16] = shape.payload.itemsize == 2
        words[IS_PLAIN], words[PER_CHOICE] = shape.compressed is None, shape.per_expert_answers
        words[SENDS_ALL] = sends_all
        if port is not None:
            words[OUT_FLAG : BLOCK + 1] = array("Q", port)
        if shaper is not None:
            words[SHAPER] = shaper.address
        words[COUNT] = count.buffer_info()[0] + count.itemsize * header[2]
        self.address = words[SELF] = words.buffer_info()[0]
        self._count = count
        self._shaper = shaper

    @property
    def place(self) -> int:
        """Return the address of a word that holds `address`."""
        return self.address + 8 * SELF

    @property
    def is_placed(self) -> bool:
        """Return whether the newest frame's hidden rows went where hops.await_frame was told to."""
        block = self.words[BLOCK]
        return block != 0 and ctypes.c_int64.from_address(block + IS_PLACED).value != 0

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Return the first row and the end of each run of the newest request's rows.

        Empty if its rows were written into the outbox.
        """
        ends = self._runs[: 2 * self.words[NUM_RUNS]]
        return list(zip(ends[::2], ends[1::2], strict=True))

    @property
    def request(self) -> bytes:
        """Return the header of the newest request, as it was sent or taken."""
        return self.words[:NUM_WORDS].tobytes()


def travels_plain(shape: NetShape) -> bool:
    """Return whether compiled code alone can write a request and add its answer."""
    return (
        shape.compressed is None and not shape.per_expert_answers and shape.payload == shape.compute
    )
