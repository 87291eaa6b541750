"""Decoder and rally against transformers: every family, any chunking, any micro-batches.

The net is a direct call into expert_nodes.Experts, so only the node's arithmetic and its
order of operations are tested here; the transports have their own contract suite.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_nodes.step import kv_cache
from attention_nodes.step.absent_experts import NoNet
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.executor import run_layers
from attention_nodes.step.rally import Companions
from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.sequences import SequenceTable, TableLimits
from attention_nodes.step.step_inputs import host_inputs, slice_up
from expert_nodes.experts import Experts
from kernels.dispatch import select_ops
from m2n_comm.net import ExpertBatch
from models.checkpoints.checkpoint import Checkpoint
from models.description.config import load_model_config
from tests.attention_nodes.plans import micro_batch, new_sequence
from tests.checkpoints import VARIANTS, make_checkpoint, oracle_model
from tests.pairwise import few
from tests.variants import DIFFERENT
from tests.weights import load_attention_weights, load_expert_weights
from topspin.messages import pack_ints
from topspin.plan.kv_cache import BlockNeeds

BLOCK_SIZE = 4
MAX_LEN = 64
PROMPT_LENS = (13, 5, 21)


class DirectNet:
    """One expert node, called directly; stores dispatches by micro-batch."""

    local: frozenset[int] = frozenset()

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self._answers: dict[tuple[int, int], Tensor] = {}

    def dispatch(
        self,
        micro_batch: int,
        layer: int,
        hidden: Tensor,
        experts: Tensor,
        weights: Tensor,
        num_rows: Tensor | None = None,
    ) -> None:
        assert num_rows is None
        batch = ExpertBatch(micro_batch, layer, 0, hidden, experts.int(), weights, (len(hidden),))
        assert (micro_batch, layer) not in self._answers
        self._answers[micro_batch, layer] = self._experts.compute(batch)

    def combine(self, micro_batch: int, layer: int, out: Tensor) -> Tensor:
        return out.copy_(self._answers.pop((micro_batch, layer)))


class Model:
    """Decoder, experts, cache and table of one checkpoint, without processes."""

    def __init__(self, path: Path, kernels: str = "reference") -> None:
        self.config = load_model_config(path)
        ops = select_ops(kernels, torch.float32)
        cache = kv_cache.allocate(
            kv_cache.layer_specs(self.config, torch.float32),
            needs=BlockNeeds(block_size=BLOCK_SIZE, max_step_tokens=MAX_LEN),
            size_bytes=4 * 2**20,
            max_len=MAX_LEN,
        )
        weights = load_attention_weights(Checkpoint(path), self.config, dtype=torch.float32)
        self.decoder = Decoder(self.config, weights, ops, cache)
        self.rotary = RotaryTable(self.config, max_len=MAX_LEN)
        self.table = SequenceTable(
            TableLimits(MAX_LEN, BLOCK_SIZE, cache.num_blocks, self.config.vocab_size)
        )
        self.net: Any = NoNet()
        if self.config.moe is not None:
            everyone = [range(self.config.moe.num_experts)] * len(self.config.moe_layers)
            experts = load_expert_weights(
                Checkpoint(path), self.config, dtype=torch.float32, experts=everyone
            )
            self.net = DirectNet(Experts(self.config, experts.layers, ops, held=everyone))
        self._next_block = 0
        self.num_beats = 0

    def count_beat(self) -> None:
        self.num_beats += 1

    def admit(self, seq_id: int, tokens: list[int]) -> None:
        num_blocks = -(-len(tokens) // BLOCK_SIZE)
        # Blocks in descending order, so that a wrongly read table shows.
        blocks = [self._next_block + num_blocks - 1 - idx for idx in range(num_blocks)]
        self._next_block += num_blocks
        self.table.admit(new_sequence(seq_id, tokens, blocks=pack_ints(blocks)))

    def advance(self, micro_batches: list[dict[int, int]]) -> dict[int, Tensor]:
        """Advance sequences by the given numbers of tokens; return each one's last logits."""
        parts = [slice_up(micro_batch(slices), self.table) for slices in micro_batches]
        inputs = host_inputs(parts, self.rotary)
        combined = torch.full((len(inputs.tokens), self.config.hidden_size), torch.nan)
        companions = Companions(beat=self.count_beat)
        residual = run_layers(self.decoder, self.net, inputs, combined, companions)
        rows = residual[inputs.sample_rows]
        for part in parts:
            self.table.commit(part.rows, part.counts)
        seq_ids = np.concatenate([part.seq_ids for part in parts])
        return dict(zip(seq_ids.tolist(), self.decoder.logits(rows), strict=True))


def prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab_size, size=length).tolist() for length in PROMPT_LENS]


@pytest.mark.parametrize("kernels", ["reference", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", few(sorted(VARIANTS), *DIFFERENT))
@torch.inference_mode()
def test_logits_equal_transformers_for_any_chunking(
    tmp_path: Path, variant: str, kernels: str
) -> None:
    """Whole prompts, uneven chunks and decode-sized steps all give transformers' logits.

    With the compiled kernels every family runs in tests/identity.
    """
    checkpoint = make_checkpoint(tmp_path, variant)
    model = Model(checkpoint, kernels)
    oracle = oracle_model(checkpoint)
    tokens = prompts(model.config.vocab_size)
    for seq_id, prompt in enumerate(tokens):
        model.admit(seq_id, prompt)
    model.advance([{0: 7}, {1: 2, 2: 20}])
    assert model.num_beats == 2 * len(model.decoder.layers)
    model.advance([{1: 3}, {}, {0: 5}])
    final = model.advance([{0: 1, 2: 1}])
    for seq_id in (0, 2):
        expected = oracle(torch.tensor([tokens[seq_id]])).logits[0, -1]
        torch.testing.assert_close(final[seq_id], expected, rtol=2e-4, atol=2e-4)


@torch.inference_mode()
def test_micro_batches_do_not_change_logits(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen2_moe")
    results = []
    for split in ([[0, 1, 2]], [[0], [1, 2]], [[2], [0], [1]], [[1], [], [0, 2], []]):
        model = Model(path)
        for seq_id, prompt in enumerate(prompts(model.config.vocab_size)):
            model.admit(seq_id, prompt)
        results.append(
            model.advance([{seq_id: PROMPT_LENS[seq_id] for seq_id in part} for part in split])
        )
    for other in results[1:]:
        for seq_id, expected in results[0].items():
            torch.testing.assert_close(other[seq_id], expected, rtol=1e-4, atol=1e-4)
