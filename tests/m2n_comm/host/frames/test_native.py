"""The compiled calls against brute force, torch and wire.py: same bytes, same refusals."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.frame_header import FrameHeader, word
from m2n_comm.host.frames.native import add_answers, take_request, write_answer, write_request
from m2n_comm.host.frames.records import MAX_RUNS, NUM_PARTS, Record
from m2n_comm.host.frames.windows import PairLayout, PairWindows, private_memory
from m2n_comm.host.frames.wire import (
    ANSWER,
    HEADER_BYTES,
    MAX_PARTS,
    REQUEST,
    WORD_BYTES,
    answer_to,
    payload_code,
    read_header,
    write_header,
)
from m2n_comm.layout import route_map
from tests.m2n_comm.harness import make_shape
from tests.pairwise import cover_pairs
from topspin.expert_table import ExpertTable, Replica

ATTENTION, EXPERT, MICRO_BATCH = 513, 7, 3
# Incarnations are random 64-bit numbers, so the highest bit may be set.
INCARNATIONS = (2**64 - 3, 2**63 + 11)
LAYER, VERSION, STEP, SEQUENCE = 41, 6, 2**40 + 1, 12
NUM_SLOTS = 5
COMPARED = FrameHeader._fields[: FrameHeader._fields.index("deliver_ns")]


class Pair:
    """Both ends' records over one pair's windows, as in shared memory."""

    def __init__(
        self,
        dtype: torch.dtype,
        hidden_size: int = 13,
        *,
        sends_all: bool = False,
        in_place: bool = False,
        **shape: Any,
    ) -> None:
        self.shape = make_shape(payload=dtype, hidden_size=hidden_size, **shape)
        layout = PairLayout(self.shape)
        self.layout = layout
        self.windows: PairWindows = layout.map(private_memory(layout))
        self.request = self.windows.requests[MICRO_BATCH]
        self.answer = self.windows.answers[MICRO_BATCH]
        names = (ATTENTION, EXPERT, MICRO_BATCH)
        counts = [array("Q", bytes(8 * (MICRO_BATCH + 1))) for _ in range(2)]
        windows: dict[str, Any] = {"outbox": self.request, "inbox": self.answer}
        sends: dict[str, Any] = {"count": counts[0], "sends_all": sends_all, "in_place": in_place}
        self.attention = Record(layout, names, INCARNATIONS, **windows, **sends)
        windows = {"outbox": self.answer, "inbox": self.request}
        self.expert = Record(layout, names, INCARNATIONS[::-1], **windows, count=counts[1])

    def send(
        self, hidden: Tensor, chosen: Tensor, weights: Tensor, columns: Tensor, part: int = 0
    ) -> int:
        """Write a part of a request to the node whose slots are `columns` i32[P]."""
        count: int = write_request(
            self.attention.address,
            chosen.data_ptr(),
            columns.data_ptr(),
            len(columns),
            len(hidden),
            hidden.data_ptr(),
            weights.data_ptr(),
            LAYER,
            part,
            VERSION,
            STEP,
            SEQUENCE,
        )
        return count

    def take(self, **changes: int) -> int:
        """Take it at the other end."""
        wanted = {
            "layer": LAYER,
            "part": 0,
            "max_parts": MAX_PARTS,
            "version": VERSION,
            "step": STEP,
            "sequence": SEQUENCE,
            "num_slots": NUM_SLOTS,
        }
        taken: int = take_request(self.expert.address, *(wanted | changes).values())
        return taken

    def header(self, kind: int, rows: int, **changes: int) -> FrameHeader:
        """Return the expected header of a frame of `rows` rows."""
        layout = self.layout
        request = FrameHeader(
            kind=REQUEST,
            payload=payload_code(self.shape.request_dtype),
            attention=ATTENTION,
            expert=EXPERT,
            micro_batch=MICRO_BATCH,
            layer=LAYER,
            part=0,
            num_parts=1,
            rows=rows,
            hidden_size=self.shape.hidden_size,
            incarnation=INCARNATIONS[0],
            reader_incarnation=INCARNATIONS[1],
            table_version=VERSION,
            step=STEP,
            sequence=SEQUENCE,
            payload_bytes=rows * layout.request_row_bytes,
        )._replace(**changes)
        if kind == REQUEST:
            return request
        answer = answer_to(request, payload=payload_code(self.shape.payload))
        return answer._replace(payload_bytes=rows * layout.answer_row_bytes)


def routing(seed: int, num_rows: int, dtype: torch.dtype, hidden_size: int = 13) -> Any:
    """Return hidden, chosen columns out of 9, weights, and the slots of a node that has 5."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    chosen = torch.rand(num_rows, 9, generator=generator).argsort(dim=1)[:, :3].contiguous()
    weights = torch.rand(num_rows, 3, generator=generator)
    columns = torch.tensor([-1, 4, -1, 0, 2, -1, 1, -1, 3], dtype=torch.int32)
    if seed % 3 == 0:  # a node that few rows go to
        columns = torch.tensor([-1, 4, -1, -1, -1, -1, -1, -1, -1], dtype=torch.int32)
    return hidden, chosen, weights, columns


@pytest.mark.parametrize("unknown", [-1, 9, 2**40, -(2**62)])
def test_an_unknown_expert_writes_no_header(unknown: int) -> None:
    pair = Pair(torch.float32)
    hidden, chosen, weights, columns = routing(1, 4, torch.float32)
    chosen[2, 1] = unknown
    assert pair.send(hidden, chosen, weights, columns) == -1
    assert bytes(pair.request.header) == bytes(HEADER_BYTES)


def add(pairs: list[Pair], out: Tensor, *, fills: bool = True) -> int:
    """Fill `out` with the sum of the answers of all pairs, or add them to it."""
    records = array("Q", [pair.attention.address for pair in pairs])
    taken: int = add_answers(records.buffer_info()[0], len(pairs), out.data_ptr(), int(fills))
    return taken


@pytest.mark.parametrize(
    ("hidden_size", "dtype", "sends_all"),
    cover_pairs((1, 13, 64), (torch.float32, torch.bfloat16), (False, True)),
)
def test_answers_are_added_to_the_rows_that_were_sent(
    hidden_size: int, dtype: torch.dtype, sends_all: bool
) -> None:
    """Of three expert nodes, in their order; some rows have gone to none."""
    for seed in range(8):
        out = torch.full((8, hidden_size), float("nan"))
        want = torch.zeros(8, hidden_size)
        pairs = [Pair(dtype, hidden_size, sends_all=sends_all) for _ in range(3)]
        for number, pair in enumerate(pairs):
            hidden, chosen, weights, columns = routing(seed + number, 8, dtype, hidden_size)
            columns = columns.roll(number)
            count = pair.send(hidden, chosen, weights, columns)
            assert pair.take() == count
            partial = torch.randn(count, hidden_size).to(dtype)
            size = write_answer(pair.expert.address, partial.data_ptr(), 77, 2**32 - 1)
            assert size == count * pair.layout.answer_row_bytes
            want_header = pair.header(ANSWER, count)._replace(compute_ns=77, idle_ns=2**32 - 1)
            assert read_header(bytes(pair.answer.header)) == want_header
            rows = [
                row
                for row, picked in enumerate(chosen.tolist())
                if sends_all or any(columns[column] >= 0 for column in picked)
            ]
            want[rows] += partial.float()
        assert add(pairs, out) == 0
        assert torch.equal(out, want)


def test_bf16_values_of_every_kind_keep_their_bits() -> None:
    pair = Pair(torch.bfloat16, 2**13, sends_all=True)
    hidden, chosen, weights, columns = routing(1, 8, torch.bfloat16, 2**13)
    assert pair.send(hidden, chosen, weights, columns) == 8
    assert pair.take() == 8
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    partial = every.view(torch.bfloat16).view(8, 2**13)
    write_answer(pair.expert.address, partial.data_ptr(), 0, 0)
    out = torch.empty(8, 2**13)
    assert add([pair], out) == 0
    assert torch.equal(out.view(torch.int32), partial.float().view(torch.int32))


def test_an_answer_that_lies_in_the_window_already_is_not_touched() -> None:
    pair = Pair(torch.float32)
    assert pair.send(*routing(1, 4, torch.float32)) >= 0
    count = pair.take()
    pair.answer.first(count).hidden.fill_(3.0)
    write_answer(pair.expert.address, 0, 0, 0)
    assert torch.equal(pair.answer.first(count).hidden, torch.full((count, 13), 3.0))


def test_any_damaged_byte_of_a_compared_field_is_refused_at_both_ends() -> None:
    for byte in range(word("deliver_ns") * WORD_BYTES):
        pair = Pair(torch.bfloat16)
        count = pair.send(*routing(1, 6, torch.bfloat16))
        before = pair.expert.request
        pair.request.header[byte] ^= 0x40
        assert pair.take(max_parts=1) == -1
        assert pair.expert.request == before
        pair.request.header[byte] ^= 0x40
        assert pair.take(max_parts=1) == count
        write_answer(pair.expert.address, 0, 0, 0)
        pair.answer.header[byte] ^= 0x40
        out = torch.zeros(6, 13)
        assert add([pair], out) == -1
        assert not out.any()


def test_a_frame_of_another_kind_step_or_size_is_refused() -> None:
    """The sides then use the plain path, which names the field."""
    for name in COMPARED:
        pair = Pair(torch.float32)
        pair.send(*routing(1, 6, torch.float32))
        right = read_header(bytes(pair.request.header))
        for delta in (-1, 1):
            value = getattr(right, name) + delta
            if value >= 0:
                write_header(pair.request.header, right._replace(**{name: value}))
                assert pair.take(max_parts=1) == -1, (name, value)
        write_header(pair.request.header, right)
        pair.take(max_parts=1)
        write_answer(pair.expert.address, 0, 0, 0)
        answer = read_header(bytes(pair.answer.header))
        out = torch.zeros(6, 13)
        for delta in (-1, 1):
            value = getattr(answer, name) + delta
            if value >= 0:
                write_header(pair.answer.header, answer._replace(**{name: value}))
                assert add([pair], out) == -1, (name, value)
        assert not out.any()


@pytest.mark.parametrize(
    "change",
    [{"layer": LAYER + 1}, {"version": 5}, {"step": STEP - 1}, {"sequence": SEQUENCE + 1}],
)
def test_only_the_frame_that_is_due_is_taken(change: dict[str, int]) -> None:
    pair = Pair(torch.float32)
    pair.send(*routing(1, 6, torch.float32))
    assert pair.take(**change) == -1
    assert pair.take() >= 0


def test_more_rows_than_a_window_has_are_refused_before_they_are_read() -> None:
    pair = Pair(torch.float32)
    pair.send(*routing(1, 6, torch.float32))
    rows = pair.shape.window_rows + 1
    write_header(pair.request.header, pair.header(REQUEST, rows))
    assert pair.take() == -1


@pytest.mark.parametrize("slot", [-2, -(2**31), NUM_SLOTS, 2**31 - 1])
def test_a_slot_that_is_not_there_is_refused(slot: int) -> None:
    pair = Pair(torch.float32, sends_all=True)
    assert pair.send(*routing(1, 6, torch.float32)) == 6
    slots = pair.request.slots
    assert slots is not None
    assert int(slots[:6].max()) == NUM_SLOTS - 1
    assert pair.take() == 6
    slots[5, 2] = slot
    assert pair.take() == -1


@pytest.mark.parametrize(
    ("num_rows", "every"),
    [(0, 1), (1, 1), (300, 1), (8, 2), (255, 2), (256, 2), (257, 2), (300, 2), (255, 3), (300, 3)],
)
def test_rows_that_lie_in_few_runs_are_left_where_they_are(num_rows: int, every: int) -> None:
    """Every row, every second one (each a run of its own), or two of three choose the node."""
    pair = Pair(torch.bfloat16, in_place=True, window_rows=300)
    hidden = torch.randn(num_rows, 13).to(torch.bfloat16)
    held = [row for row in range(num_rows) if every == 1 or row % every != 0]
    chosen = torch.ones(num_rows, 3, dtype=torch.int64)
    chosen[held] = 0
    columns = torch.tensor([4, -1], dtype=torch.int32)
    pair.request.hidden.fill_(7)
    rows = pair.send(hidden, chosen, torch.rand(num_rows, 3), columns)
    assert rows == len(held)
    runs = pair.attention.runs
    if len(runs) == 0:
        assert torch.equal(pair.request.hidden[:rows], hidden[held])
        assert not held or (every == 2 and rows > MAX_RUNS) or (every == 3 and rows > 2 * MAX_RUNS)
        return
    assert [row for first, end in runs for row in range(first, end)] == held
    assert all(end < first for (_, end), (first, _) in itertools.pairwise(runs))
    assert bool((pair.request.hidden == 7).all())
    assert torch.equal(pair.request.slots[:rows, 0], torch.full((rows,), 4, dtype=torch.int32))


@st.composite
def routings(draw: st.DrawFn) -> tuple[ExpertTable, int, list[list[int]]]:
    """Draw a table (replicas, any slot order), a layer, and distinct experts per token."""
    num_experts, nodes = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    layers = []
    for _ in range(2):
        holders = [draw(st.sets(st.integers(0, nodes - 1), min_size=1)) for _ in range(num_experts)]
        layers.append(
            tuple(
                tuple(draw(st.permutations([e for e in range(num_experts) if node in holders[e]])))
                for node in range(nodes)
            )
        )
    table = ExpertTable(version=3, num_experts=num_experts, slots=tuple(layers))
    table.validate()
    top_k = draw(st.integers(1, num_experts))
    token = st.permutations(range(num_experts)).map(lambda order: list(order[:top_k]))
    return table, draw(st.integers(0, 1)), draw(st.lists(token, max_size=12))


@given(
    routings(),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([{}, {"per_expert_answers": True}, {"compressed": torch.int8}]),
)
@settings(max_examples=40)
def test_every_choice_goes_once_to_one_of_its_replicas_and_its_row_comes_back(
    routing: tuple[ExpertTable, int, list[list[int]]],
    window_rows: int,
    half: bool,
    kind: dict[str, Any],
) -> None:
    """In as many parts as a node's share takes; expert nodes answer with the token's number."""
    table, layer, tokens = routing
    top_k = len(tokens[0]) if tokens else 1
    experts = torch.tensor(tokens, dtype=torch.int64).view(-1, top_k)
    chosen, num_tokens = experts, len(experts)
    route = route_map(table)
    if (choice := route.choices[layer]) is not None:
        chosen = torch.empty_like(experts)
        choice.choose(experts.view(-1), out=chosen.view(-1))
    hidden = torch.randn(num_tokens, 13).to(torch.bfloat16 if half else torch.float32)
    weights, served = torch.rand(num_tokens, top_k), torch.zeros(num_tokens, top_k)
    # 0 where no expert has the row; the rows of choices are put where they belong.
    per_choice = "per_expert_answers" in kind
    total = torch.zeros(num_tokens * top_k if per_choice else num_tokens, 13)
    places = total.to(hidden.dtype) if per_choice else total
    want = torch.zeros(num_tokens, 13)
    for node in range(table.num_nodes):
        sends_all, part, last = table.num_nodes == 1, 0, -1
        pair = Pair(hidden.dtype, sends_all=sends_all, window_rows=window_rows, top_k=top_k, **kind)
        columns = route.slot_of[layer][node].contiguous()
        while part == 0 or part < pair.attention.words[NUM_PARTS]:
            count = pair.send(hidden, chosen, weights, columns, part)
            assert 0 < count <= window_rows or (count == part == 0)
            header = bytes(pair.request.header)
            where = {"layer": LAYER, "part": part, "num_parts": pair.attention.words[NUM_PARTS]}
            assert read_header(header) == pair.header(REQUEST, count, **where)
            assert pair.attention.request == header
            assert pair.take(part=part, num_slots=99) == count
            assert pair.take(part=part + 1, num_slots=99) == -1
            rows = pair.attention.chosen[:count].long()
            assert sorted({*rows.tolist(), last}) == [last, *rows.tolist()]
            last = int(rows[-1]) if count else last
            found = pair.request.first(count)
            assert torch.equal(found.weights, weights[rows])
            if "compressed" not in kind:
                assert torch.equal(found.hidden, hidden[rows])
            for token, slots in zip(rows.tolist(), found.slots.tolist(), strict=True):
                for position, slot in enumerate(slots):
                    if slot >= 0:
                        assert Replica(node, slot) in table.replicas(layer)[tokens[token][position]]
                        served[token, position] += 1
            numbers = rows.repeat_interleave((found.slots >= 0).sum(1)) if per_choice else rows
            answer = numbers.float()[:, None].expand(-1, 13).to(hidden.dtype).contiguous()
            size = write_answer(pair.expert.address, answer.data_ptr(), 0, 0)
            assert size == answer.nbytes
            want[rows] += rows.float()[:, None]
            assert add([pair], places, fills=False) == 0
            part += 1
    assert torch.equal(served, torch.ones_like(served))
    if per_choice:
        want = torch.arange(num_tokens).repeat_interleave(top_k).float()[:, None].expand(-1, 13)
    assert torch.equal(places.float(), want)
