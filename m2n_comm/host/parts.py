"""Dispatches that are more than one frame of plain rows: several windows, codes, pairs.

Owns how a part is written and how its answer is checked and added, for one attention node:
in torch, by the rules of layout.py, payload.py, pairs.py and wire.py. Knows no transport and
no credits; attention_side.py says which part goes when, and calls native.py for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from m2n_comm.host.pair_sums import PairPlan, PairSum, plan_pairs
from m2n_comm.host.windows import PairLayout, Window
from m2n_comm.host.wire import (
    ANSWER,
    NUM_COMPARED,
    REQUEST,
    FrameHeader,
    check_header,
    check_size,
    payload_code,
    read_header,
    write_header,
)
from m2n_comm.layout import RouteMap, SendPlan, num_parts, plan_sends, write_part
from m2n_comm.net import NetShape


@dataclass(slots=True)
class Parts:
    """One dispatch: its plan, how many parts each node gets, and the newest header to each."""

    version: int
    plan: SendPlan
    hidden: torch.Tensor
    weights: torch.Tensor
    counts: list[int]
    pairs: PairPlan | None
    sent: dict[int, FrameHeader] = field(default_factory=dict)


class PartFrames:
    """Writes requests and reads answers. `experts` are the incarnations of the expert nodes.

    One buffer serves all micro-batches, since combine() runs one dispatch at a time.
    """

    def __init__(
        self, shape: NetShape, *, index: int, incarnation: int, experts: tuple[int, ...]
    ) -> None:
        layout = PairLayout(shape)
        self._shape = shape
        self._index = index
        self._incarnation = incarnation
        self._experts = experts
        self._request_row_bytes = layout.request_row_bytes
        self._answer_row_bytes = layout.answer_row_bytes
        self._payload = payload_code(shape.request_dtype)
        self._answer_start = (ANSWER, payload_code(shape.payload))
        self._pair_sum = PairSum(shape) if shape.per_pair_answers else None
        self._scratch = torch.empty((shape.window_rows, shape.hidden_size), dtype=torch.float32)

    @property
    def registered_bytes(self) -> int:
        """Return the bytes of the buffers."""
        pairs = self._pair_sum.size_bytes if self._pair_sum is not None else 0
        return self._scratch.nbytes + pairs

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
        pairs = None
        if self._pair_sum is not None:
            pairs = plan_pairs(plan, experts, weights, window_rows=window_rows)
        counts = [num_parts(count, window_rows) for count in plan.counts]
        return Parts(route.version, plan, hidden, weights, counts, pairs)

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
    ) -> int:
        """Write one part, rows and header, into the request window; return its rows."""
        window_rows = self._shape.window_rows
        low = part * window_rows
        high = min(low + window_rows, parts.plan.counts[expert])
        write_part(
            window,
            parts.plan,
            expert,
            low=low,
            high=high,
            hidden=parts.hidden,
            weights=parts.weights,
            scratch=self._scratch,
        )
        rows = high - low
        header = FrameHeader(
            kind=REQUEST,
            payload=self._payload,
            attention=self._index,
            expert=expert,
            micro_batch=micro_batch,
            layer=layer,
            part=part,
            num_parts=parts.counts[expert],
            rows=rows,
            hidden_size=self._shape.hidden_size,
            attention_incarnation=self._incarnation,
            expert_incarnation=self._experts[expert],
            table_version=parts.version,
            step=step,
            sequence=sequence,
            payload_bytes=rows * self._request_row_bytes,
            deliver_ns=0,
            payload_crc=0,
        )
        write_header(window.header, header)
        parts.sent[expert] = header
        return rows

    def read(
        self, parts: Parts, raw: bytes, window: Window, *, expert: int, out: torch.Tensor
    ) -> None:
        """Check the answer to the newest part of `expert` and add it to out f32[T, H].

        With one expert node the rows are put there; pairs wait for finish(). Raises
        StaleFrame or FrameError.
        """
        sent = parts.sent[expert]
        part = sent.part
        if parts.pairs is not None:
            sent = sent._replace(rows=parts.pairs.num_rows(expert, part))
        header = read_header(raw)
        self.check_answer(header, sent, expert)
        rows = header.rows
        answer = window.first(rows).hidden
        if self._pair_sum is not None and parts.pairs is not None:
            self._pair_sum.put(parts.pairs, expert, part, answer)
            return
        if rows == 0:
            return
        low = part * self._shape.window_rows
        selected = parts.plan.rows[expert]
        if len(self._experts) == 1:
            out[low : low + rows].copy_(answer)
        elif selected is None:
            out[low : low + rows].add_(answer)
        else:
            wide = self._scratch[:rows].copy_(answer)
            out.index_add_(0, selected[low : low + rows], wide)

    def finish(self, parts: Parts, out: torch.Tensor) -> None:
        """Add the pairs up, if answers are pairs: all of them have been read."""
        if self._pair_sum is not None and parts.pairs is not None:
            self._pair_sum.add_up(parts.pairs, out)

    def check_answer(self, header: FrameHeader, sent: FrameHeader, expert: int) -> None:
        """Raise StaleFrame or FrameError unless `header` is of the answer to `sent`."""
        origin = f"expert {expert}"
        # An answer repeats its request, but for the first two fields.
        start = self._answer_start
        if header[:2] != start or header[2:NUM_COMPARED] != sent[2:NUM_COMPARED]:
            check_header(header, sent._replace(kind=ANSWER, payload=start[1]), origin=origin)
        check_size(
            header,
            window_rows=self._shape.answer_rows,
            row_bytes=self._answer_row_bytes,
            origin=origin,
        )
