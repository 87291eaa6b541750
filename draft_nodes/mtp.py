"""Drafts by the head of multi-token prediction that a checkpoint carries, beside an attention node.

Owns the target's final rows of each sequence until the head has computed with them, and the rows
that the head made of nodes of its tree. A row of the head joins a token with the final row of the
token before it: the target's where the target has computed that one, else the head's own, so that
one head drafts any number of tokens. The head's context begins where the target's rows do: behind a
prefix that was in the cache. Knows no weights (mtp_layers.py) and no tree (spec_decode.forest).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from attention_nodes.local_experts import ColocatedExperts
from attention_nodes.step import kv_cache
from attention_nodes.step.decoder import Decoder
from attention_nodes.step.drafts import FinalRows
from draft_nodes.kv_layout import KvLayout
from draft_nodes.model import BLOCK_SIZE, DraftModel
from draft_nodes.mtp_layers import MtpLayers
from kernels.dispatch import select_ops
from kernels.runtime import open_runtime
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.mtp_weights import load_mtp_weights
from models.description.config import load_model_config
from spec_decode.draft import NO_DRAFT, ROOT, Draft, DraftRequest, DraftText
from spec_decode.forest import MAX_CHUNK, Growth, Kept, PassRows
from spec_decode.serial import SerialDrafter
from topspin.plan.precision import formats
from topspin.plan.spec import NodeConfig
from topspin.process import release_freed_memory


@dataclass(eq=False)
class _HeadSequence:
    """The rows of a sequence whose first token here is `start` in its text.

    `held` [n, H] are the target's, of the tokens before those that are not fed yet; `tail` [H] is
    the head's of the last fed token, `live` [n, H] those of the nodes of its tree by place.
    """

    start: int
    held: list[Tensor] = field(default_factory=list)
    num_held: int = 0
    num_fed: int = 0
    tail: Tensor | None = None
    live: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Return how many tokens of the text can be fed."""
        return self.start + self.num_fed + self.num_held

    def take(self, count: int) -> Tensor:
        """Return the target's rows [count, H] for the next tokens, which are fed."""
        rows = torch.cat(self.held)
        self.held, self.num_held = [rows[count:]], self.num_held - count
        self.num_fed += count
        return rows[:count]


class MtpModel:
    """Satisfies spec_decode.forest.CachedModel for a forest that does not reuse trees."""

    def __init__(self, model: DraftModel, layers: MtpLayers) -> None:
        """`layers` are those of `model`."""
        self._model = model
        self._layers = layers
        self._sequences: dict[int, _HeadSequence] = {}

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def max_length(self) -> int:
        """Return the most positions that it computes."""
        return self._model.max_length

    def share(self, target: Decoder) -> None:
        """Compute beside `target`."""
        self._layers.share(target)

    def hold(self, seq_id: int, first: int, rows: Tensor) -> None:
        """Keep the target's final rows [n, H] of a sequence's tokens from `first` on.

        They follow those before, if it has some.
        """
        own = self._sequences.setdefault(seq_id, _HeadSequence(first + 1))
        assert own.end == first + 1, "rows are missing"
        own.held.append(rows)
        own.num_held += len(rows)

    def known(self, seq_id: int) -> _HeadSequence | None:
        """Return what is kept of a sequence; None: nothing."""
        return self._sequences.get(seq_id)

    def open(self, seq_id: int, *, num_prompt: int) -> None:
        self._model.open(seq_id, num_prompt=num_prompt)

    def reserve(self, seq_id: int, num_rows: int) -> bool:
        return self._model.reserve(seq_id, num_rows)

    def forward(self, rows: Sequence[PassRows], *, num_top: int) -> list[list[dict[int, float]]]:
        before, begin = self._layers.before, 0
        is_fed = [self._sequences[each.seq_id].num_held > 0 for each in rows]
        for each, feeds in zip(rows, is_fed, strict=True):
            end = begin + len(each.tokens)
            before[begin:end] = self._rows_before(each, feeds=feeds)
            begin = end
        found = self._model.forward(rows, num_top=num_top)
        begin = 0
        after = self._layers.after[: sum(each.num_wanted for each in rows)].clone()
        for each, feeds in zip(rows, is_fed, strict=True):
            own, made = self._sequences[each.seq_id], after[begin : begin + each.num_wanted]
            begin += each.num_wanted
            if not feeds:
                own.live += made
            elif each.num_wanted:
                own.tail = made[-1]
        return found

    def _rows_before(self, rows: PassRows, *, feeds: bool) -> Tensor:
        """Return the final rows [n, H] of the tokens before those of `rows`."""
        own = self._sequences[rows.seq_id]
        if feeds:
            return own.take(len(rows.tokens))
        assert own.tail is not None, "a tree without a root"
        tail = own.tail
        return torch.stack([tail if each == ROOT else own.live[each] for each in rows.parents])

    def keep(self, kept: Sequence[Kept]) -> None:
        for each in kept:
            assert not each.kept, "no tree goes on"
            self._sequences[each.seq_id].live.clear()
        self._model.keep(kept)

    def drop(self, seq_id: int) -> None:
        self._model.drop(seq_id)
        self.forget(seq_id)

    def forget(self, seq_id: int) -> None:
        """Let go of a sequence's rows, if it has some."""
        self._sequences.pop(seq_id, None)


def load_mtp_model(
    config: NodeConfig, model_path: Path, *, num_slots: int, max_rows: int
) -> MtpModel:
    """Load the head of the model at `model_path`, with room for `num_slots` tokens.

    It computes with the node's own kernels, in the precision of the node's layers, at most
    `max_rows` rows in a pass. Raises ConfigError if the model has no head, CheckpointError if the
    checkpoint lacks tensors of it.
    """
    model = load_model_config(model_path, config.model.hf_overrides).of_mtp()
    node, rules, checkpoint = config.node, config.precision, Checkpoint(model_path)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    runtime = open_runtime(node.device, node.kernels)
    quantised = formats(rules, "attention")
    if model.moe is not None:
        quantised |= formats(rules, "expert")
    ops = select_ops(node.kernels, dtype, quantised, node.device)
    num_blocks = max(kv_cache.MIN_BLOCKS, -(-num_slots // BLOCK_SIZE))
    specs = kv_cache.layer_specs(model, dtype)[-1:]
    cache = kv_cache.of_blocks(specs, num_blocks, block_size=BLOCK_SIZE, runtime=runtime)
    weights = load_mtp_weights(checkpoint, model, dtype=dtype, precision=rules)
    layers = MtpLayers(model, weights, ops, cache, max_rows=max_rows, precision=rules)
    if model.moe is not None:
        layers.experts = ColocatedExperts.load(
            *(checkpoint, model, ops, runtime),
            layers=(model.num_layers - 1,),
            dtype=dtype,
            precision=rules,
        )
    release_freed_memory()
    return MtpModel(
        DraftModel(
            layers,
            KvLayout(num_blocks=num_blocks, block_size=BLOCK_SIZE),
            runtime,
            max_length=min(model.context_length, config.model.max_model_len),
            recordings=config.execution.recordings,
            slow=node.slow,
        ),
        layers,
    )


class MtpDrafter:
    """Drafts with a head; satisfies attention_nodes.step.drafts.RowDrafter.

    Rows are kept until a draft is wanted, at most about MAX_CHUNK of a sequence: then the head
    computes them, so that a prompt has been computed when its first draft is wanted.
    """

    def __init__(self, model: MtpModel, growth: Growth) -> None:
        self._model = model
        self._serial = SerialDrafter(model, growth, max_length=model.max_length, reuses_trees=False)

    def follow(self, target: Decoder) -> None:
        self._model.share(target)

    def take(self, rows: Sequence[FinalRows]) -> None:
        full: list[DraftText] = []
        for text, first, final in rows:
            known = self._model.known(text.seq_id)
            if known is not None and known.end != first + 1:
                self.end(text)  # what lies between is missing: the head begins again
            self._model.hold(text.seq_id, first, final)
            known = self._model.known(text.seq_id)
            assert known is not None
            if known.num_held >= MAX_CHUNK:
                full.append(_part_of(text, known))
        self._serial.feed(full)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        asked = {}
        for each in requests:
            known = self._model.known(each.text.seq_id)
            if known is not None and known.end == len(each.text.tokens):
                asked[each.text.seq_id] = each._replace(text=_part_of(each.text, known))
        drafts = dict(zip(asked, self._serial.draft(list(asked.values())), strict=True))
        return [drafts.get(each.text.seq_id, NO_DRAFT) for each in requests]

    def end(self, text: DraftText) -> None:
        self._serial.end(text)
        self._model.forget(text.seq_id)

    def close(self) -> None:
        self._serial.close()


def _part_of(text: DraftText, known: _HeadSequence) -> DraftText:
    """Return the part of a text that the head computes."""
    num_prompt = max(0, text.num_prompt - known.start)
    return text._replace(tokens=text.tokens[known.start : known.end], num_prompt=num_prompt)
