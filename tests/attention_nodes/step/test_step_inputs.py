"""From plan to indices: checked against a plain loop over tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.sequences import SequenceTable, TableLimits
from attention_nodes.step.step_inputs import host_inputs, slice_up
from models.description.config import load_model_config
from models.rope import inverse_frequencies, rope_seq_len
from tests.attention_nodes.plans import micro_batch, new_sequence
from tests.checkpoints import make_checkpoint
from topspin.errors import ProtocolError
from topspin.messages import SAMPLE, MicroBatch, pack_ints

BLOCK_SIZE = 4
LIMITS = TableLimits(max_len=40, block_size=BLOCK_SIZE, num_blocks=50, vocab_size=288)


@pytest.fixture(params=["llama", "llama_dynamic_ntk"])
def rotary(request: pytest.FixtureRequest, tmp_path: Path) -> RotaryTable:
    path = make_checkpoint(tmp_path, request.param)
    return RotaryTable(load_model_config(path), max_len=40)


def table_of(prompts: dict[int, list[int]], *, committed: dict[int, int]) -> SequenceTable:
    table = SequenceTable(LIMITS)
    for seq_id, prompt in prompts.items():
        blocks = pack_ints([seq_id * 3 + 1])
        table.admit(new_sequence(seq_id, prompt, num_computed=committed[seq_id], blocks=blocks))
    return table


def two_slices(**changes: bytes) -> MicroBatch:
    blocks = {"block_counts": pack_ints([2, 0]), "block_ids": pack_ints([40, 30])}
    return replace(micro_batch({2: 5, 0: 1}, [0, SAMPLE], **blocks), **changes)


def test_indices_equal_a_loop_over_tokens(rotary: RotaryTable) -> None:
    prompts = {0: [9, 8, 7], 2: list(range(100, 120))}
    table = table_of(prompts, committed={0: 2, 2: 3})
    slices = slice_up(two_slices(), table)
    inputs = host_inputs([slices], rotary)
    (part,) = inputs.parts
    blocks = {0: [1], 2: [7, 40, 30]}
    tokens, slots = [], []
    for seq_id, start, count in ((2, 3, 5), (0, 2, 1)):
        for position in range(start, start + count):
            tokens.append(prompts[seq_id][position])
            block = blocks[seq_id][position // BLOCK_SIZE]
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
    assert inputs.tokens.tolist() == tokens
    assert part.kv_slots.tolist() == slots
    assert part.meta.query_start.tolist() == [0, 5, 6]
    assert part.meta.context_lens.tolist() == [8, 3]
    assert part.meta.block_tables.tolist()[0] == [7, 40]
    assert (part.meta.max_query_len, part.meta.max_context_len) == (5, 8)
    assert inputs.sample_rows.tolist() == [5]
    assert slices.seq_ids.tolist() == [0]


def test_rows_to_sample_count_through_the_micro_batches(rotary: RotaryTable) -> None:
    table = table_of({0: [9, 8, 7], 2: list(range(20))}, committed={0: 2, 2: 3})
    parts = [slice_up(micro_batch({seq_id: 1}), table) for seq_id in (2, 0)]
    inputs = host_inputs(parts, rotary)
    assert [part.start for part in inputs.parts] == [0, 1]
    assert inputs.tokens.tolist() == [3, 7]
    assert inputs.sample_rows.tolist() == [0, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_ids": pack_ints([2])},
        {"seq_ids": pack_ints([2, 5])},
        {"block_counts": pack_ints([3, 0])},
        {"block_counts": pack_ints([-1, 3])},
        {"num_tokens": pack_ints([5, 2])},
        {"wanted": b""},
    ],
)
def test_contradictory_plans_are_refused(changes: dict[str, bytes]) -> None:
    table = table_of({0: [9, 8, 7], 2: list(range(20))}, committed={0: 2, 2: 3})
    with pytest.raises(ProtocolError):
        slice_up(two_slices(**changes), table)


def test_an_empty_micro_batch_has_no_rows(rotary: RotaryTable) -> None:
    (part,) = host_inputs([slice_up(micro_batch({}), SequenceTable(LIMITS))], rotary).parts
    assert part.num_tokens == 0
    assert part.cos.shape[0] == 0


def test_dynamic_frequencies_follow_each_tokens_own_length(tmp_path: Path) -> None:
    config = load_model_config(make_checkpoint(tmp_path, "llama_dynamic_ntk"))
    rotary = RotaryTable(config, max_len=40)
    positions, prompts = np.array([3, 19, 20, 30]), np.array([20, 20, 20, 7])
    cos, sin = rotary.gather(positions, prompts)
    for idx, (position, prompt) in enumerate(zip(positions, prompts, strict=True)):
        seq_len = rope_seq_len(int(position), prompt_len=int(prompt))
        frequencies = inverse_frequencies(config.rope, config.head_dim, seq_len=seq_len)
        angles = torch.from_numpy(frequencies.inv_freq) * float(position)
        torch.testing.assert_close(cos[idx], angles.cos())
        torch.testing.assert_close(sin[idx], angles.sin())
