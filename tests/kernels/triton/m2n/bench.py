"""Windows of M2N's kernels on one device, for tests that play one side or both by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.m2n_windows import (
    HEADER_WORDS,
    AnswerWindow,
    Control,
    RequestWindow,
    WindowShape,
    host_words,
    step_words,
)
from kernels.runtime import Runtime, open_runtime
from kernels.triton.m2n.attention_port import AttentionPort
from kernels.triton.m2n.expert_port import ExpertPort

ATTENTION, EXPERT = 2**63 + 10, 500
"""First incarnations; those of attention nodes do not fit a signed word."""
PATIENCE_NS = 10**10
SHORT_NS = 2 * 10**6


def runtime_of(device: torch.device) -> Runtime:
    return open_runtime(str(device))


def control_of(device: torch.device, num_peers: int) -> Control:
    host = runtime_of(device).host_buffer(host_words(num_peers) * 8).view(torch.int64)
    return Control(host, device)


def _views(
    memory: Tensor,
    places: Sequence[int],
    parts: Sequence[tuple[tuple[int, ...], torch.dtype]],
) -> tuple[Tensor, ...]:
    """Return tensors of u8 `memory` that begin at addresses."""
    found = []
    for place, (shape, dtype) in zip(places, parts, strict=True):
        begin = place - memory.data_ptr()
        part = memory[begin : begin + math.prod(shape) * dtype.itemsize]
        found.append(part.view(dtype).view(shape))
    return tuple(found)


@dataclass
class Bench:
    """M attention nodes, N expert nodes and B micro-batches, all windows on one device."""

    shape: WindowShape
    device: torch.device
    m: int = 1
    n: int = 1
    num_micro_batches: int = 1
    memory: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        pairs = [
            (a, e, mb)
            for a in range(self.m)
            for e in range(self.n)
            for mb in range(self.num_micro_batches)
        ]
        self._requests = {pair: self._new(self.shape.request_bytes) for pair in pairs}
        self._answers = {pair: self._new(self.shape.answer_bytes) for pair in pairs}
        self.steps = [self._words() for _ in range(self.m + self.n)]
        self.controls = [control_of(self.device, self.n) for _ in range(self.m)]
        self.controls += [control_of(self.device, self.m) for _ in range(self.n)]

    def _new(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def _words(self) -> Tensor:
        return torch.zeros(HEADER_WORDS + self.m, dtype=torch.int64, device=self.device)

    def begin(
        self,
        step: int,
        *,
        version: int = 1,
        participants: tuple[int, ...] | None = None,
        patience_ns: int = PATIENCE_NS,
    ) -> None:
        """Announce a step to all nodes, with its patience."""
        for words in self.steps:
            new = step_words(
                patience_ns=patience_ns,
                step=step,
                version=version,
                participants=tuple(range(self.m)) if participants is None else participants,
            )
            words[: len(new)] = torch.tensor(new)

    def request(self, attention: int, expert: int, mb: int = 0) -> tuple[Tensor, ...]:
        """Return slots, weights, hidden, scales and header."""
        shape = self.shape
        parts = (
            ((shape.rows, shape.top_k), torch.int32),
            ((shape.rows, shape.top_k), torch.float32),
            ((shape.rows, shape.hidden_size), shape.wire),
            ((shape.rows,), torch.float32),
            ((HEADER_WORDS,), torch.int64),
        )
        memory = self._requests[attention, expert, mb]
        return _views(memory, shape.request_at(memory.data_ptr()), parts)

    def answer(self, attention: int, expert: int, mb: int = 0) -> tuple[Tensor, ...]:
        """Return hidden and header."""
        rows = (self.shape.rows, self.shape.hidden_size)
        memory = self._answers[attention, expert, mb]
        places = self.shape.answer_at(memory.data_ptr())
        return _views(memory, places, ((rows, self.shape.answer), ((HEADER_WORDS,), torch.int64)))

    def request_window(self, *pair: int) -> RequestWindow:
        return self.shape.request_at(self._requests[pair].data_ptr())

    def answer_window(self, *pair: int) -> AnswerWindow:
        return self.shape.answer_at(self._answers[pair].data_ptr())

    def attention_port(self, index: int = 0, mb: int = 0) -> AttentionPort:
        return AttentionPort(
            self.shape,
            [self.request_window(index, e, mb) for e in range(self.n)],
            [self.answer_window(index, e, mb) for e in range(self.n)],
            control=self.controls[index],
            step=self.steps[index],
            incarnation=ATTENTION + index,
            peers=[EXPERT + e for e in range(self.n)],
            micro_batch=mb,
        )

    def expert_port(
        self, index: int = 0, *, limits: tuple[int, ...], compute: torch.dtype = torch.float32
    ) -> ExpertPort:
        windows = [(a, index, mb) for a in range(self.m) for mb in range(self.num_micro_batches)]
        return ExpertPort(
            self.shape,
            [self.request_window(*window) for window in windows],
            [self.answer_window(*window) for window in windows],
            control=self.controls[self.m + index],
            step=self.steps[self.m + index],
            limits=torch.tensor(limits, device=self.device),
            incarnation=EXPERT + index,
            peers=[ATTENTION + a for a in range(self.m)],
            compute=compute,
        )
