"""The layout, by address, of the memory through which GPUs exchange rows.

Owns the layout of request and answer windows, of a step's words, and of the words in which
kernels report a fault to the host. Knows no memory (m2n_comm maps it, or the peer's) and no
kernel: kernels/triton/m2n reads and writes by it, and it needs no Triton.

A window lies in its reader's memory. Its header is HEADER_WORDS of i64; word 0, the flag, is the
sequence of the newest frame and is written last. An answer has the header of its request except
for the incarnation, which is always that of the frame's writer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.frame_header import NUM_DEVICE_WORDS

HEADER_WORDS: Final = NUM_DEVICE_WORDS
FLAG, ROWS, STEP, VERSION, LAYER, PART, PARTS, INCARNATION = range(HEADER_WORDS)
"""The words of a header, the first of FrameHeader's; its sequence is the flag."""

PATIENCE: Final = 0
"""In a step's words, which otherwise are a header: how many nanoseconds a wait may last."""

ABORT: Final = 8
"""In the host's words: not 0 ends every wait. The words after it, one per peer: it is gone."""
CODE, PEER, MICRO_BATCH, WHERE, PLACE, FOUND, WANTED = range(7)
"""In the host's words: the first fault. WHERE is its layer, PLACE the wrong word of a header."""

ALIGNMENT: Final = 16
_LINE_BYTES: Final = 128


class Fault(IntEnum):
    """A fault found by a kernel; the first fault of a net is kept, and ends all its waits."""

    LATE = 1
    GONE = 2
    ABORTED = 3
    STALE = 4
    HEADER = 5
    TOO_MANY_ROWS = 6
    SLOT = 7
    EXPERT = 8


class RequestWindow(NamedTuple):
    """Addresses of an expert node's input: slots i32[W, K], weights f32[W, K], hidden [W, H].

    scales f32[W] only if hidden is fp8; header i64[HEADER_WORDS].
    """

    slots: int
    weights: int
    hidden: int
    scales: int
    header: int


class AnswerWindow(NamedTuple):
    """Addresses of an attention node's input: sums [W, H] of the rows in their order."""

    hidden: int
    header: int


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


@dataclass(frozen=True, kw_only=True)
class WindowShape:
    """Windows of W `rows` of H `hidden_size` numbers, `top_k` experts each.

    Requests travel as `wire` (bf16, fp32, or e4m3 with a scale per row), answers as `answer`.
    """

    rows: int
    hidden_size: int
    top_k: int
    wire: torch.dtype
    answer: torch.dtype

    @property
    def is_compressed(self) -> bool:
        """Return whether requests carry scales."""
        return self.wire == torch.float8_e4m3fn

    @property
    def _request_sizes(self) -> tuple[int, ...]:
        choices = self.rows * self.top_k * 4
        hidden = self.rows * self.hidden_size * self.wire.itemsize
        return choices, choices, hidden, self.rows * 4, HEADER_WORDS * 8

    @property
    def _answer_sizes(self) -> tuple[int, ...]:
        return self.rows * self.hidden_size * self.answer.itemsize, HEADER_WORDS * 8

    @property
    def request_bytes(self) -> int:
        """Return the size of a request window."""
        return sum(map(_aligned, self._request_sizes))

    @property
    def answer_bytes(self) -> int:
        """Return the size of an answer window."""
        return sum(map(_aligned, self._answer_sizes))

    def request_at(self, address: int) -> RequestWindow:
        """Return the request window that begins at `address`."""
        return RequestWindow(*_places(address, self._request_sizes))

    def answer_at(self, address: int) -> AnswerWindow:
        """Return the answer window that begins at `address`."""
        return AnswerWindow(*_places(address, self._answer_sizes))


def _places(address: int, sizes: tuple[int, ...]) -> list[int]:
    places = []
    for size in sizes:
        places.append(address)
        address += _aligned(size)
    return places


class Control:
    """The words that host and kernels of one net share.

    `host` i64 is pinned memory of the host that the device reads and writes: the first fault,
    the abort word and a word per peer. `failed` i32[1] on the device is not 0 after a fault;
    nothing is sent or awaited then.
    """

    def __init__(self, host: Tensor, device: torch.device) -> None:
        """Raises ValueError for memory that is too small; see host_words."""
        if host.dtype != torch.int64 or len(host) <= ABORT:
            raise ValueError(f"host words: {host.dtype} {tuple(host.shape)}")
        self._host = host
        self._words = host.numpy()
        self.failed = torch.zeros(1, dtype=torch.int32, device=device)
        base = host.data_ptr()
        self.addresses = torch.tensor([base, base + ABORT * 8], dtype=torch.int64, device=device)

    @property
    def fault(self) -> Fault | None:
        """Return the first fault of completed kernels, if there was one."""
        code = int(self._words[CODE])
        return Fault(code) if code else None

    def word(self, index: int) -> int:
        """Return a word of the fault, such as PEER."""
        return int(self._words[index])

    def abort(self) -> None:
        """End every wait of kernels, including running ones."""
        self._words[ABORT] = 1

    def lose(self, peer: int) -> None:
        """End every wait for `peer` whose frame is not there yet."""
        self._words[ABORT + 1 + peer] = 1


def host_words(num_peers: int) -> int:
    """Return the number of the host's words for a net with `num_peers` peers."""
    return ABORT + 1 + num_peers


def step_words(
    *, patience_ns: int, step: int, version: int, participants: tuple[int, ...] = ()
) -> list[int]:
    """Return the words of a step: a header that frames must match, then the participants.

    Step 0 is a rehearsal: kernels send nothing and wait for nothing.
    """
    words = [0] * HEADER_WORDS
    words[PATIENCE], words[STEP], words[VERSION] = patience_ns, step, version
    return [*words, *participants]


def signed(word: int) -> int:
    """Return the i64 with the bits of an unsigned 64-bit `word`."""
    return word - 2**64 if word >= 2**63 else word
