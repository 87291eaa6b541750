"""M2N between GPUs, as one attention node sees it: dispatch and combine, one kernel each.

Owns the device's side of one micro-batch: which sequence each expert node was sent, where its
rows went, and the tables of addresses of the windows. What a window holds and who maps it is
the transport's matter (m2n_comm); a request window has slots i32[W, K], weights f32[W, K],
hidden [W, H] and, if that is fp8, scales f32[W], a count of rows i64 and a flag i64; an answer
window hidden [W, H] and a flag i64. The rules are those of m2n_comm.layout: a row goes once to
each node that has any of its experts, in ascending order, with slot -1 for its other experts.

The expert node answers a sequence by writing its rows' sums and then that number into the
answer's flag. Sequences start at 1; flags, counters and sequences start at 0. Programs of
combine that wait keep their multiprocessors: experts on the same device must be ordered before
it by an event, or they may never get to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_m2n_kernels import combine_row, put_row

_TYPES: Final = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}
ALIGNMENT: Final = 16
COMBINE_BLOCK: Final = 1024
CHUNK: Final = 64
"""Rows whose experts a program looks at together to find a row's place."""


class RequestWindow(NamedTuple):
    """What one expert node reads; tensors on this device or mapped into it."""

    slots: Tensor
    """i32[W, K]."""
    weights: Tensor
    """f32[W, K]."""
    hidden: Tensor
    """[W, H] bf16, fp32, or e4m3 with scales."""
    scales: Tensor
    """f32[W]; not written but with e4m3."""
    num_rows: Tensor
    """i64[1], the rows of the newest request."""
    flag: Tensor
    """i64[1], its sequence."""


class AnswerWindow(NamedTuple):
    """What one expert node writes: weighted partial sums of the rows in their order."""

    hidden: Tensor
    """[W, H] bf16 or fp32."""
    flag: Tensor
    """i64[1], the sequence that they answer."""


class DeviceNet:
    """The pairs of one attention node and micro-batch with all N expert nodes.

    `dispatch` and `combine` take turns, on one stream; neither waits on the host.
    """

    def __init__(
        self,
        requests: Sequence[RequestWindow],
        answers: Sequence[AnswerWindow],
        *,
        max_rows: int,
    ) -> None:
        """Raises ValueError for windows that hold fewer than `max_rows` rows, or differ."""
        kinds = {(w.hidden.dtype, w.hidden.shape[1], w.slots.shape[1]) for w in requests}
        answer_kinds = {(w.hidden.dtype, w.hidden.shape[1]) for w in answers}
        widths = {kind[1] for kind in kinds | answer_kinds}
        if len(kinds) != 1 or len(answer_kinds) != 1 or len(widths) != 1:
            raise ValueError(f"windows of different kinds: {kinds}, {answer_kinds}")
        if len(requests) != len(answers):
            raise ValueError(f"{len(requests)} request windows, {len(answers)} answer windows")
        all_hidden = [*(w.hidden for w in requests), *(w.hidden for w in answers)]
        if any(hidden.data_ptr() % ALIGNMENT for hidden in all_hidden):
            raise ValueError(f"hidden rows must begin at a multiple of {ALIGNMENT} bytes")
        smallest = min(len(hidden) for hidden in all_hidden)
        if smallest < max_rows:
            raise ValueError(f"a window holds {smallest} rows, not {max_rows}")
        self.requests, self.answers = tuple(requests), tuple(answers)
        self.device = requests[0].hidden.device
        self._requests_at = self._addresses(self.requests)
        self._answers_at = self._addresses(self.answers)
        self._max_rows = max_rows
        num_nodes = len(requests)
        self._places = torch.full(
            (num_nodes * max_rows,), -1, dtype=torch.int32, device=self.device
        )
        self._done = torch.zeros(num_nodes, dtype=torch.int32, device=self.device)
        self.sequences = torch.zeros(num_nodes, dtype=torch.int64, device=self.device)
        self.late = torch.zeros(num_nodes, dtype=torch.int32, device=self.device)

    def _addresses(self, windows: Sequence[tuple[Tensor, ...]]) -> Tensor:
        rows = [[each.data_ptr() for each in window] for window in windows]
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def dispatch(self, hidden: Tensor, experts: Tensor, weights: Tensor, slot_of: Tensor) -> None:
        """Send hidden [T, H] to the nodes of experts i64[T, K], with weights f32[T, K].

        slot_of i32[N, experts] is the local slot of each expert on each node, -1 elsewhere.
        An expert id that it does not have is on no node. Raises ValueError for shapes that
        do not fit the windows.
        """
        num_rows, top_k = experts.shape
        window = self.requests[0]
        wanted = ((num_rows, window.hidden.shape[1]), (num_rows, window.slots.shape[1]))
        if (tuple(hidden.shape), (num_rows, top_k)) != wanted or weights.shape != experts.shape:
            raise ValueError(f"hidden {tuple(hidden.shape)}, experts {tuple(experts.shape)}")
        if not 0 < num_rows <= self._max_rows:
            raise ValueError(f"{num_rows} rows, windows for 1 to {self._max_rows}")
        if slot_of.shape[0] != len(self.requests):
            raise ValueError(f"slots on {slot_of.shape[0]} nodes, {len(self.requests)} windows")
        put_row[(len(self.requests), num_rows)](
            hidden,
            experts.contiguous(),
            weights.contiguous(),
            slot_of.contiguous(),
            self._requests_at,
            self._places,
            self._done,
            self.sequences,
            num_rows,
            hidden.shape[1],
            slot_of.shape[1],
            hidden.stride(0),
            WIRE=_TYPES[window.hidden.dtype],
            COMPRESSED=window.hidden.dtype == torch.float8_e4m3fn,
            K=top_k,
            K_PAD=triton.next_power_of_2(top_k),
            H_PAD=triton.next_power_of_2(hidden.shape[1]),
            CHUNK=CHUNK,
            num_warps=4,
        )

    def combine(self, out: Tensor, *, patience: int) -> Tensor:
        """Fill out f32[T, H] with the sums of all answers to the last dispatch, and return it.

        A node whose answer has not come after `patience` nanoseconds gets its entry of `late`
        set, and its rows are NaN: who reads the step's result looks there first.
        """
        num_rows, width = out.shape
        answer = self.answers[0].hidden
        if out.dtype != torch.float32 or width != answer.shape[1] or num_rows > self._max_rows:
            raise ValueError(f"combine into {out.dtype} {tuple(out.shape)}")
        combine_row[(num_rows, triton.cdiv(width, COMBINE_BLOCK))](
            self._answers_at,
            self._places,
            self.sequences,
            self.late,
            out,
            num_rows,
            width,
            len(self.answers),
            out.stride(0),
            patience,
            ANSWER=_TYPES[answer.dtype],
            BLOCK=COMBINE_BLOCK,
            num_warps=4,
        )
        return out
