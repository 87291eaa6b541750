"""The attention node's side of M2N between GPUs: dispatch, and combine after a wait.

Owns the device's side of one micro-batch: the sequence sent to each expert node, the places of
its rows, the expected header of its answer, and the tables of addresses of the windows. The
transport maps them (m2n_comm.gpu.ipc_attention); their layout is `kernels.m2n_windows`. The
rules are those of m2n_comm.layout: a row goes once to each node that has any of its experts, in
ascending order, with slot -1 for its other experts.

The expert node (`kernels.triton.m2n.expert_port`) answers a sequence by writing its rows' sums, the
request's header with its own incarnation, and then that number into the answer's flag. Sequences
start at 1; flags, counters and sequences start at 0. Waiting programs of combine occupy their
multiprocessors: experts on the same device must be ordered before it by an event, or they may
never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.m2n_windows import (
    ALIGNMENT,
    HEADER_WORDS,
    AnswerWindow,
    Control,
    RequestWindow,
    WindowShape,
    signed,
)
from kernels.triton.m2n.attention_kernels import await_answer, combine_row, put_row

TYPES: Final = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}
COMBINE_BLOCK: Final = 1024
CHUNK: Final = 64
"""Rows whose experts a program reads together to find a row's place."""


def address_table(windows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Return i64[N, columns] on the device. Raises ValueError for one that is not aligned."""
    if any(address % ALIGNMENT for window in windows for address in window):
        raise ValueError(f"windows must begin at a multiple of {ALIGNMENT} bytes")
    return torch.tensor([list(window) for window in windows], dtype=torch.int64, device=device)


class AttentionPort:
    """The pairs of one attention node and micro-batch with all N expert nodes.

    `dispatch` and `combine` alternate, on one stream; neither waits on the host. Faults on the
    device are kept in `control`; sums are NaN then.
    """

    def __init__(
        self,
        shape: WindowShape,
        requests: Sequence[RequestWindow],
        answers: Sequence[AnswerWindow],
        *,
        control: Control,
        step: Tensor,
        incarnation: int,
        peers: Sequence[int],
        micro_batch: int = 0,
    ) -> None:
        """`step` i64 holds m2n_windows.step_words on the device; `peers` are N incarnations.

        Raises ValueError for windows that are not aligned, or not N of each.
        """
        if not len(requests) == len(answers) == len(peers):
            raise ValueError(
                f"{len(requests)} request windows, {len(answers)} answer windows, "
                f"{len(peers)} peers"
            )
        self.shape = shape
        self._control = control
        self._step = step
        self._micro_batch = micro_batch
        self._num_nodes = len(peers)
        device = step.device
        self._requests = address_table(requests, device)
        self._answers = address_table(answers, device)
        identity = [signed(each) for each in (incarnation, *peers)]
        self._identity = torch.tensor(identity, dtype=torch.int64, device=device)
        num_places = self._num_nodes * max(shape.rows, 1)
        self._places = torch.full((num_places,), -1, dtype=torch.int32, device=device)
        self._done = torch.zeros(self._num_nodes, dtype=torch.int32, device=device)
        self._sequences = torch.zeros(self._num_nodes, dtype=torch.int64, device=device)
        self._ready = torch.zeros(self._num_nodes, dtype=torch.int32, device=device)
        sent = (self._num_nodes, HEADER_WORDS)
        self._sent = torch.zeros(sent, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its device memory, without windows."""
        mine = (self._requests, self._answers, self._identity, self._places)
        counters = (self._done, self._sequences, self._ready, self._sent)
        return sum(each.nbytes for each in (*mine, *counters))

    def dispatch(
        self,
        hidden: Tensor,
        experts: Tensor,
        weights: Tensor,
        slot_of: Tensor,
        *,
        layer: int,
        num_rows: Tensor | None = None,
        first: int = 0,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        """Send hidden [T, H] to the nodes of experts i64[T, K], with weights f32[T, K].

        slot_of i32[V, N, experts] is the local slot of each expert on each node, -1 elsewhere;
        row r goes by variant r % V. These are rows `first` and on of a micro-batch, of which
        the first num_rows[0] are real (i64[1]; None: all); T may be 0. Raises ValueError for
        shapes that do not fit the windows. An expert that does not exist is a fault.
        """
        num_given, top_k = experts.shape
        shape = self.shape
        wanted = (num_given, shape.hidden_size), (num_given, shape.top_k)
        if (tuple(hidden.shape), (num_given, top_k)) != wanted or weights.shape != experts.shape:
            raise ValueError(f"hidden {tuple(hidden.shape)}, experts {tuple(experts.shape)}")
        if num_given > shape.rows:
            raise ValueError(f"{num_given} rows, windows for {shape.rows}")
        if slot_of.ndim != 3 or slot_of.shape[1] != self._num_nodes:
            raise ValueError(f"slots {tuple(slot_of.shape)}, {self._num_nodes} nodes")
        if hidden.stride(1) != 1:
            hidden = hidden.contiguous()
        put_row[(self._num_nodes, max(num_given, 1))](
            hidden,
            experts.contiguous(),
            weights.contiguous(),
            slot_of.contiguous(),
            self._step if num_rows is None else num_rows,
            self._requests,
            self._identity,
            self._step,
            self._places,
            self._sent,
            self._done,
            self._sequences,
            self._control.failed,
            self._control.addresses,
            num_given,
            shape.hidden_size,
            slot_of.shape[2],
            slot_of.shape[0],
            hidden.stride(0),
            first,
            parts * shape.rows,
            layer,
            part,
            parts,
            self._micro_batch,
            HAS_ROWS=num_rows is not None,
            WIRE=TYPES[shape.wire],
            COMPRESSED=shape.is_compressed,
            K=top_k,
            K_PAD=triton.next_power_of_2(top_k),
            H_PAD=triton.next_power_of_2(shape.hidden_size),
            CHUNK=CHUNK,
            num_warps=4,
        )

    def combine(self, out: Tensor, *, layer: int) -> Tensor:
        """Fill out f32[T, H] with the sums of all answers to the last dispatch, and return it.

        Raises ValueError for an `out` that does not fit.
        """
        num_rows, width = out.shape
        fits = width == self.shape.hidden_size and num_rows <= self.shape.rows
        if out.dtype != torch.float32 or not fits or out.stride(1) != 1:
            raise ValueError(f"combine into {out.dtype} {tuple(out.shape)}")
        await_answer[(self._num_nodes,)](
            self._answers,
            self._sent,
            self._step,
            self._control.failed,
            self._control.addresses,
            self._ready,
            layer,
            self._micro_batch,
            num_warps=4,
        )
        combine_row[(max(num_rows, 1), triton.cdiv(width, COMBINE_BLOCK))](
            self._answers,
            self._places,
            self._ready,
            self._step,
            self._control.failed,
            out,
            num_rows,
            width,
            self._num_nodes,
            out.stride(0),
            ANSWER=TYPES[self.shape.answer],
            BLOCK=COMBINE_BLOCK,
            num_warps=4,
        )
        return out
