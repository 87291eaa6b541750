"""Indices on a device against those on the host, row by row, with and without padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_nodes.device.inputs import NO_SLOT, DeviceInputs
from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.sequences import SequenceTable, TableLimits
from attention_nodes.step.step_inputs import Slices, host_inputs, slice_up
from kernels.runtime import HostRuntime
from models.description.config import load_model_config
from tests.attention_nodes.plans import micro_batch, new_sequence
from tests.checkpoints import make_checkpoint
from topspin.errors import ProtocolError
from topspin.messages import pack_ints

LIMITS = TableLimits(max_len=40, block_size=4, num_blocks=200, vocab_size=288, num_groups=2)
MAX_SEQS = 8


@pytest.fixture(scope="module", params=["llama", "llama_dynamic_ntk"])
def rotary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RotaryTable:
    path = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return RotaryTable(load_model_config(path), max_len=40)


def device_inputs(rotary: RotaryTable, *, max_rows: int = 16) -> DeviceInputs:
    return DeviceInputs(
        HostRuntime(),
        rotary,
        LIMITS,
        max_tokens=64,
        max_seqs=MAX_SEQS,
        max_rows=max_rows,
        max_padded=4 * MAX_SEQS,
    )


def table_of(lengths: list[int], committed: list[int]) -> SequenceTable:
    table = SequenceTable(LIMITS)
    for seq_id, (length, done) in enumerate(zip(lengths, committed, strict=True)):
        table.admit(
            new_sequence(
                seq_id,
                [(seq_id * 31 + idx) % 288 for idx in range(length)],
                num_prompt_tokens=max(1, length // 2),
                num_computed=done,
                # One of each group of layers, side by side.
                blocks=pack_ints(range(seq_id * 20 + 19, seq_id * 20 - 1, -1)),
            )
        )
    return table


def slices_of(table: SequenceTable, counts: dict[int, int], sample: list[bool]) -> Slices:
    return slice_up(micro_batch(counts, sample), table)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[list[int]], bool]]:
    """Draw a few steps: lengths, committed, the sequences of each micro-batch, decode or not."""
    drawn = []
    for _ in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=MAX_SEQS))
        committed = [draw(st.integers(0, length - 1)) for length in lengths]
        m = draw(st.integers(1, 4))
        part_of = [draw(st.integers(0, m - 1)) for _ in lengths]
        parts = [[seq for seq, part in enumerate(part_of) if part == each] for each in range(m)]
        drawn.append((lengths, committed, parts, draw(st.booleans())))
    return drawn


@settings(max_examples=25)
@given(sequence=steps(), data=st.data())
def test_real_rows_are_the_hosts_and_the_others_are_nobodys(
    sequence: list[tuple[list[int], list[int], list[list[int]], bool]],
    data: st.DataObject,
    rotary: RotaryTable,
) -> None:
    ours = device_inputs(rotary)
    for lengths, committed, parts, decodes in sequence:
        table = table_of(lengths, committed)
        micro_batches = []
        for part in parts:
            most = {seq: 1 if decodes else lengths[seq] - committed[seq] for seq in part}
            counts = {seq: data.draw(st.integers(1, min(6, limit))) for seq, limit in most.items()}
            sample = [data.draw(st.booleans()) for _ in part]
            micro_batches.append(slices_of(table, counts, sample))
        expected = host_inputs(micro_batches, rotary)
        bucket = None
        if decodes:
            bucket = max(1, *(len(part) for part in parts)) + data.draw(st.integers(0, 2))
            bucket = min(bucket, MAX_SEQS)
        found = ours.complete(ours.place(micro_batches, bucket))
        num_sampled = len(expected.sample_rows)
        assert len(found.sample_rows) == (
            num_sampled if bucket is None else min(len(parts) * bucket, MAX_SEQS)
        )
        sampled = []
        for part, theirs in zip(found.parts, expected.parts, strict=True):
            real = theirs.num_tokens
            rows = slice(part.start, part.start + real)
            assert part.num_tokens == (bucket or real)
            torch.testing.assert_close(found.tokens[rows], expected.tokens[theirs.start :][:real])
            torch.testing.assert_close(part.cos[:real], theirs.cos)
            torch.testing.assert_close(part.sin[:real], theirs.sin)
            assert not found.tokens[part.start + real : part.start + part.num_tokens].any()
            meta, wanted = part.meta, theirs.meta
            seqs, columns = wanted.block_tables.shape
            assert torch.equal(meta.query_start[: seqs + 1], wanted.query_start)
            assert (meta.query_start[seqs:] == real).all()
            assert torch.equal(meta.context_lens[:seqs], wanted.context_lens)
            for group in range(LIMITS.num_groups):
                ours_of, theirs_of = part.of_group(group), theirs.of_group(group)
                assert torch.equal(ours_of.kv_slots[:real], theirs_of.kv_slots)
                assert (ours_of.kv_slots[real:] == NO_SLOT).all()
                tables = ours_of.meta.block_tables[:seqs, :columns]
                assert torch.equal(tables, theirs_of.meta.block_tables)
            if bucket is None:
                assert part.num_rows is None
                assert meta.max_context_len == wanted.max_context_len
            else:
                assert part.num_rows is not None
                assert part.num_rows.tolist() == [real]
                assert (meta.max_query_len, meta.max_context_len) == (1, LIMITS.max_len)
            inside = (expected.sample_rows >= theirs.start) & (
                expected.sample_rows < theirs.start + real
            )
            sampled += (expected.sample_rows[inside] - theirs.start + part.start).tolist()
        assert found.sample_rows[:num_sampled].tolist() == sampled


def test_a_token_that_only_the_device_knows_is_found_there(rotary: RotaryTable) -> None:
    table, ours = table_of([3, 2], [2, 1]), device_inputs(rotary)
    both = slices_of(table, {0: 1, 1: 1}, [True, True])
    placed = ours.place([both], None)
    table.commit(both.rows, both.counts)
    table.reserve(both.sampled)
    ours.keep(placed, torch.tensor([41, 42]))
    following = slices_of(table, {1: 1, 0: 1}, [True, True])
    assert (following.tokens < 0).all()
    assert ours.complete(ours.place([following], None)).tokens.tolist() == [42, 41]
    assert ours.complete(ours.place([following], 4)).tokens.tolist() == [42, 41, 0, 0]


def test_a_padded_step_has_the_addresses_of_the_one_before(rotary: RotaryTable) -> None:
    ours = device_inputs(rotary)

    def addresses(lengths: list[int]) -> list[int]:
        table = table_of(lengths, [length - 1 for length in lengths])
        counts = dict.fromkeys(range(len(lengths)), 1)
        placed = ours.place([slices_of(table, counts, [True] * len(lengths))], 4)
        ((meta, other),) = placed.metas
        tensors = [placed.literals, placed.last_rows, *placed.angles, placed.kv_slots]
        tensors += [placed.sample_rows, meta.query_start, meta.context_lens, meta.block_tables]
        tensors += [other.block_tables]
        assert placed.num_rows is not None
        return [each.data_ptr() for each in (*tensors, placed.num_rows)]

    assert addresses([3, 30, 7]) == addresses([1]) == addresses([29, 2, 2, 2])


def test_more_sequences_than_there_is_room_for_are_refused(rotary: RotaryTable) -> None:
    table = table_of([2] * (MAX_SEQS + 1), [0] * (MAX_SEQS + 1))
    counts = dict.fromkeys(range(MAX_SEQS + 1), 1)
    slices = slices_of(table, counts, [False] * (MAX_SEQS + 1))
    with pytest.raises(ProtocolError, match="9 sequences in a step, more than 8"):
        device_inputs(rotary).place([slices], None)
    few = slices_of(table, {5: 1}, [False])
    with pytest.raises(ProtocolError, match="more than 5 sequences are on this node"):
        device_inputs(rotary, max_rows=5).place([few], None)
