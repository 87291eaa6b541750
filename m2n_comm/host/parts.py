"""Dispatches of more than one frame of plain rows: several windows, compression, expert rows.

Owns writing a part, and checking and adding its answer, for one attention node: in torch, by
the rules of layout.py, payload.py, expert_rows.py and wire.py. Knows no transport and no
credits; attention_side.py decides when a part is sent, and calls native.py for other dispatches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.frame_header import FrameHeader
from m2n_comm.hello import Identity
from m2n_comm.host.expert_rows import RowPlan, RowSum, plan_rows
from m2n_comm.host.lines import bytes_of
from m2n_comm.host.native import add_bf16
from m2n_comm.host.windows import PairLayout, Window
from m2n_comm.host.wire import (
    REQUEST,
    answer_to,
    check_header,
    check_size,
    payload_code,
    read_header,
    write_header,
)
from m2n_comm.layout import RouteMap, SendPlan, num_parts, plan_sends
from m2n_comm.payload import pack_rows


@dataclass(slots=True)
class Parts:
    """One dispatch: its plan, each node's number of parts, and the newest header to each."""

    version: int
    plan: SendPlan
    hidden: torch.Tensor
    weights: torch.Tensor
    counts: list[int]
    rows: RowPlan | None
    sent: dict[int, FrameHeader] = field(default_factory=dict)


class PartFrames:
    """Writes requests and reads answers. `experts` are the incarnations of the expert nodes.

    One buffer serves all micro-batches, since combine() runs one dispatch at a time.
    """

    def __init__(self, me: Identity, *, experts: tuple[int, ...]) -> None:
        shape = me.shape
        layout = PairLayout(shape)
        self._shape = shape
        self._me = me
        self._experts = experts
        self._request_row_bytes = layout.request_row_bytes
        self._answer_row_bytes = layout.answer_row_bytes
        self._request_payload = payload_code(shape.request_dtype)
        self._answer_payload = payload_code(shape.payload)
        self._row_sum = RowSum(shape) if shape.per_expert_answers else None
        self._scratch = torch.empty((shape.window_rows, shape.hidden_size), dtype=torch.float32)

    @property
    def registered_bytes(self) -> int:
        """Return the bytes of the buffers."""
        rows = self._row_sum.size_bytes if self._row_sum is not None else 0
        return self._scratch.nbytes + rows

    def plan(
        self,
        route: RouteMap,
        layer: int,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> Parts:
        """Plan a dispatch. Raises FrameError for unknown experts."""
        window_rows = self._shape.window_rows
        plan = plan_sends(route, layer, experts)
        rows = None
        if self._row_sum is not None:
            rows = plan_rows(plan, experts, weights, window_rows=window_rows)
        counts = [num_parts(count, window_rows) for count in plan.counts]
        return Parts(route.version, plan, hidden, weights, counts, rows)

    def write(
        self,
        parts: Parts,
        window: Window,
        *,
        expert: int,
        micro_batch: int,
        layer: int,
        part: int,
        step: int,
        sequence: int,
        with_hidden: bool = True,
    ) -> int:
        """Write one part, rows and header, into the request window; return its rows."""
        low, high = self._range(parts, expert, part)
        write_part(
            window,
            parts.plan,
            expert,
            low=low,
            high=high,
            hidden=parts.hidden,
            weights=parts.weights,
            scratch=self._scratch,
            with_hidden=with_hidden,
        )
        rows = high - low
        header = FrameHeader(
            sequence=sequence,
            rows=rows,
            step=step,
            table_version=parts.version,
            layer=layer,
            part=part,
            num_parts=parts.counts[expert],
            incarnation=self._me.incarnation,
            reader_incarnation=self._experts[expert],
            kind=REQUEST,
            payload=self._request_payload,
            attention=self._me.index,
            expert=expert,
            micro_batch=micro_batch,
            hidden_size=self._shape.hidden_size,
            payload_bytes=rows * self._request_row_bytes,
        )
        write_header(window.header, header)
        parts.sent[expert] = header
        return rows

    def in_place(self, parts: Parts, *, expert: int, part: int) -> list[memoryview]:
        """Return the hidden rows of one part if they are one piece of memory, else nothing."""
        low, high = self._range(parts, expert, part)
        hidden = parts.hidden[low:high]
        if (
            low == high
            or parts.plan.rows[expert] is not None
            or hidden.dtype != self._shape.request_dtype
            or not (hidden.is_cpu and hidden.is_contiguous())
        ):
            return []
        return [bytes_of(hidden)]

    def _range(self, parts: Parts, expert: int, part: int) -> tuple[int, int]:
        """Return the first row of a part and its end."""
        low = part * self._shape.window_rows
        return low, min(low + self._shape.window_rows, parts.plan.counts[expert])

    def writes_first(self, parts: Parts) -> bool:
        """Return whether the first node's answers are all rows, and others add to these."""
        everywhere = all(rows is None for rows in parts.plan.rows)
        return len(self._experts) == 1 or (self._row_sum is None and everywhere)

    def read(
        self, parts: Parts, raw: bytes, window: Window, *, expert: int, out: torch.Tensor
    ) -> None:
        """Check the answer to the newest part of `expert` and add it to out f32[T, H].

        Rows that are the first ones are copied there (writes_first); answers per expert wait for
        finish(). Raises StaleFrame or FrameError.
        """
        sent = parts.sent[expert]
        part = sent.part
        if parts.rows is not None:
            sent = sent._replace(rows=parts.rows.num_rows(expert, part))
        header = read_header(raw)
        self.check_answer(header, sent, expert)
        rows = header.rows
        answer = window.first(rows).hidden
        if self._row_sum is not None and parts.rows is not None:
            self._row_sum.put(parts.rows, expert, part, answer)
            return
        if rows == 0:
            return
        low = part * self._shape.window_rows
        selected = parts.plan.rows[expert]
        if expert == 0 and self.writes_first(parts):
            out[low : low + rows].copy_(answer)
        else:
            self._add(answer, out, None if selected is None else selected[low : low + rows], low)

    def _add(
        self, answer: torch.Tensor, out: torch.Tensor, selected: torch.Tensor | None, low: int
    ) -> None:
        """Add rows of an answer to the rows `selected` of out, None: to those from `low` on."""
        rows = len(answer)
        if answer.dtype == torch.bfloat16 and out.is_cpu and out.is_contiguous():
            size = answer.shape[1]
            out_at, rows_at = out.data_ptr(), 0
            if selected is None:
                out_at += low * size * out.itemsize
            else:
                rows_at = selected.data_ptr()
            add_bf16(out_at, rows_at, answer.data_ptr(), rows, size)
        elif selected is None:
            out[low : low + rows].add_(answer)
        else:
            out.index_add_(0, selected, self._scratch[:rows].copy_(answer))

    def finish(self, parts: Parts, out: torch.Tensor) -> None:
        """Add up the rows of experts, if answers are per expert; all answers have been read."""
        if self._row_sum is not None and parts.rows is not None:
            self._row_sum.add_up(parts.rows, out)

    def check_answer(self, header: FrameHeader, sent: FrameHeader, expert: int) -> None:
        """Raise StaleFrame or FrameError unless `header` belongs to the answer to `sent`."""
        origin = f"expert {expert}"
        check_header(header, answer_to(sent, payload=self._answer_payload), origin=origin)
        check_size(
            header,
            window_rows=self._shape.answer_rows,
            row_bytes=self._answer_row_bytes,
            origin=origin,
        )


def write_part(
    window: Window,
    plan: SendPlan,
    node: int,
    *,
    low: int,
    high: int,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    scratch: torch.Tensor | None = None,
    with_hidden: bool = True,
) -> None:
    """Write rows low..high-1 of the node's share into a request window, once.

    Not `with_hidden`: all but the hidden rows, of a node that gets all rows.

    hidden [T, H] and weights [T, K] have the window's dtypes if rows are selected, unless the
    window is compressed: then hidden has any dtype, and `scratch` [W, H] fp32 is needed.
    """
    count = high - low
    if count == 0:
        return
    rows = plan.rows[node]
    slots = plan.slots[node]
    to_slots, to_weights, to_hidden, to_scales = window.first(count)
    if window.scales is not None:
        assert scratch is not None
        if rows is None:
            slots, weights = slots[low:high], weights[low:high]
            hidden = hidden[low:high]
        else:
            selected = rows[low:high]
            slots, weights = slots[selected], weights[selected]
            hidden = hidden[selected]
        to_slots.copy_(slots)
        to_weights.copy_(weights)
        pack_rows(hidden, to_hidden, to_scales, scratch)
        return
    if rows is None:
        if count < slots.shape[0]:
            slots, weights, hidden = slots[low:high], weights[low:high], hidden[low:high]
        to_slots.copy_(slots)
        to_weights.copy_(weights)
        if with_hidden:
            to_hidden.copy_(hidden)
        return
    selected = rows if count == plan.counts[node] else rows[low:high]
    torch.index_select(slots, 0, selected, out=to_slots)
    torch.index_select(weights, 0, selected, out=to_weights)
    torch.index_select(hidden, 0, selected, out=to_hidden)
