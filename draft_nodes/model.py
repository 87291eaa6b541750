"""A draft model on one device: its weights, its paged KV cache, and passes over rows of trees.

Owns what attention nodes leave to others: routed experts, all of them here, and the cache's
layout. One pass computes rows of several requests, each a node of its request's tree: its
keys are the verified prefix and its ancestors. On the CPU passes of few rows are recorded and
replayed. On a GPU, so far, kernels are launched one by one and indices copied array by array.
Implements spec_decode.forest.CachedModel; knows no tree's probabilities and no target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from attention_nodes.local_experts import ColocatedExperts
from attention_nodes.memory_budget import fitting
from attention_nodes.step import kv_cache
from attention_nodes.step.decoder import Decoder, Layer
from attention_nodes.step.recorded_steps import recorded_steps
from attention_nodes.step.rotary import RotaryTable
from attention_nodes.step.step_inputs import MicroBatchInputs, Slices, StepInputs, host_part
from draft_nodes.kv_layout import KvLayout
from draft_nodes.mtp_layers import MtpLayers
from kernels.dispatch import select_ops
from kernels.runtime import Runtime, open_runtime
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.weights import stream_attention_weights
from models.description.config import ModelConfig, load_model_config
from spec_decode.draft import ROOT
from spec_decode.forest import MAX_CHUNK, Kept, PassRows
from topspin.plan.precision import Rules, formats
from topspin.process import release_freed_memory

if TYPE_CHECKING:  # a host with a GPU may lack numba, with which it is compiled
    from kernels.cpu.compiled.slowdown import Slowdown

BLOCK_SIZE: Final = 16
MIN_QUERY_BOUND: Final = 2
"""A device's attention has variants for steps of single rows, by their number and contexts, which
decoding compiles as it records them; with a higher bound on a sequence's rows it has one."""


class Settings(NamedTuple):
    """Where and how a draft model computes.

    Its cache has `num_slots` rows; no position is `max_length` (None: the model's) or more. `slow`
    as in topspin.plan.spec.NodeSpec.
    `hf_overrides` are those of load_model_config.
    """

    dtype: torch.dtype
    num_slots: int
    max_length: int | None = None
    kernels: str = "cpu"
    device: str = "cpu"
    precision: Rules = ()
    block_size: int = BLOCK_SIZE
    recordings: bool = True
    """Whether passes of few rows are recorded and replayed; only those of the kernels "cpu" are."""
    hf_overrides: Mapping[str, object] | None = None
    slow: float = 1.0


class DraftModel:
    """One model, or the one layer that drafts for another, and the sequences it drafts for."""

    def __init__(
        self,
        decoder: Decoder | MtpLayers,
        layout: KvLayout,
        runtime: Runtime,
        *,
        max_length: int,
        recordings: bool = True,
        slow: float = 1.0,
    ) -> None:
        """`decoder` has the experts of all MoE layers; `layout` is of its cache.

        Passes take `slow` times as long as they would.
        """
        self.config: ModelConfig = decoder.config
        self.max_length = max_length
        self._decoder = decoder
        self._layout = layout
        self._runtime = runtime
        self._rotary = RotaryTable(self.config, max_len=self.max_length)
        self._steps = recorded_steps(
            decoder,
            runtime,
            self._rotary,
            vocab_size=decoder.config.vocab_size,
            recordings=recordings,
        )
        self._slowdown: Slowdown | None = None
        if slow > 1:
            from kernels.cpu.compiled.slowdown import Slowdown

            self._slowdown = Slowdown(slow)

    @classmethod
    def load(cls, path: Path, settings: Settings) -> DraftModel:
        """Read all weights of the checkpoint at `path`.

        On a GPU it makes passes of all sizes too, so that their kernels are compiled. Raises
        ConfigError for a model, format or device that is not supported, or too small a device,
        CheckpointError for a checkpoint that lacks tensors.
        """
        model = load_model_config(path, settings.hf_overrides)
        runtime = open_runtime(settings.device, settings.kernels)
        rules = settings.precision
        quantised = formats(rules, "attention") | (
            formats(rules, "expert") if model.moe_layers else frozenset()
        )
        ops = select_ops(settings.kernels, settings.dtype, quantised, settings.device)
        num_blocks = max(kv_cache.MIN_BLOCKS, -(-settings.num_slots // settings.block_size))
        with fitting(runtime, "the draft model"):
            cache = kv_cache.of_blocks(
                kv_cache.layer_specs(model, settings.dtype),
                num_blocks,
                block_size=settings.block_size,
                runtime=runtime,
            )
            weights = stream_attention_weights(
                Checkpoint(path),
                model,
                dtype=settings.dtype,
                device=runtime.device,
                precision=rules,
            )
            decoder = Decoder(model, weights, ops, cache, precision=rules)
            if model.moe_layers:
                decoder.experts = ColocatedExperts.load(
                    Checkpoint(path),
                    model,
                    ops,
                    runtime,
                    layers=model.moe_layers,
                    dtype=settings.dtype,
                    precision=rules,
                )
        release_freed_memory()
        layout = KvLayout(num_blocks=num_blocks, block_size=settings.block_size)
        longest = model.context_length
        if settings.max_length is not None:
            longest = min(longest, settings.max_length)
        made = cls(
            decoder,
            layout,
            runtime,
            max_length=longest,
            recordings=settings.recordings,
            slow=settings.slow,
        )
        if runtime.is_asynchronous:
            with fitting(runtime, "a pass of the draft model"):
                made.rehearse()
        return made

    def rehearse(self, num_rows: int = MAX_CHUNK) -> None:
        """Make passes of up to `num_rows` rows, before any sequence is open; they leave nothing.

        First and later rows of texts, and trees: the kernels of each are compiled at their first
        use, for which no request should wait. Sizes that the cache has no room for are left out.
        """
        size = 1
        while size <= min(num_rows, self.max_length - 2):
            self.open(0, num_prompt=size)
            if self.reserve(0, 3 * size):
                chain = tuple(range(ROOT, size - 1))
                for parents in (chain, (ROOT,) * size, (0,) * size):
                    self.forward([PassRows(0, (0,) * size, parents, size)], num_top=1)
                    if parents is chain:
                        self.keep([Kept(0, tuple(range(size)), ())])
            self.drop(0)
            size *= 2

    @property
    def vocab_size(self) -> int:
        """Return how many tokens there are: it computes no others."""
        return self.config.vocab_size

    @property
    def num_free_blocks(self) -> int:
        """Return the blocks of the cache that no sequence has."""
        return self._layout.num_free

    def open(self, seq_id: int, *, num_prompt: int) -> None:
        self._layout.open(seq_id, num_prompt=num_prompt)

    def reserve(self, seq_id: int, num_rows: int) -> bool:
        return self._layout.reserve(seq_id, num_rows)

    def drop(self, seq_id: int) -> None:
        self._layout.drop(seq_id)

    def keep(self, kept: Sequence[Kept]) -> None:
        sources, targets = self._layout.keep(kept)
        if len(sources):
            device = self._runtime.device
            to_device = [torch.from_numpy(each[None]).to(device) for each in (sources, targets)]
            self._decoder.kv.move(*to_device)

    @torch.inference_mode()
    def forward(self, rows: Sequence[PassRows], *, num_top: int) -> list[list[dict[int, float]]]:
        logps = self.log_probs(rows)
        top = logps.topk(min(num_top, logps.shape[1]))
        values, tokens = top.values.clamp_(max=0.0).tolist(), top.indices.tolist()
        found = [
            # A model's overflow must not become a tree's weight.
            dict(zip(ids, own, strict=True)) if own[0] > float("-inf") else {}
            for ids, own in zip(tokens, values, strict=True)
        ]
        answers = iter(found)
        return [[next(answers) for _ in range(each.num_wanted)] for each in rows]

    @torch.inference_mode()
    def log_probs(self, rows: Sequence[PassRows]) -> Tensor:
        """Compute `rows`; return fp32 log-probabilities [R, V] after the wanted ones, in order."""
        return self._logits(self._layout.place(rows)).log_softmax(-1)

    @torch.inference_mode()
    def cached(self, seq_id: int) -> list[Tensor]:
        """Return, per layer, copies [rows, G, D] of a sequence's verified keys, then its values."""
        slots = torch.from_numpy(self._layout.slots_of(seq_id)).to(self._runtime.device)
        cache = self._decoder.kv
        return [each.flatten(0, 1).index_select(0, slots) for each in (*cache.keys, *cache.values)]

    def _logits(self, rows: Slices) -> Tensor:
        """Return the logits f32[R, V] of the wanted rows, valid until the next pass."""
        placed = self._steps.place([rows], lambda: self._inputs(rows))
        return self._steps.run(placed, self._compute)

    def _compute(self, inputs: StepInputs, logits: Tensor) -> None:
        """Run all layers and write the logits f32[R, V] of the wanted rows."""
        with self._slowdown or nullcontext():
            self._run_layers(inputs, logits)

    def _run_layers(self, inputs: StepInputs, logits: Tensor) -> None:
        decoder, (part,) = self._decoder, inputs.parts
        residual = decoder.embed(inputs.tokens)
        delta: Tensor | None = None
        for layer in decoder.layers:
            normed = decoder.attention_half(layer, residual, delta, part)
            delta = decoder.local_mlp(layer, normed)
            if layer.moe_idx is not None:
                routed = self._routed(layer, layer.moe_idx, normed)
                delta = routed if delta is None else routed.add_(delta)
        assert delta is not None, "a model has layers"
        residual += delta
        if len(logits):
            decoder.logits(residual.index_select(0, inputs.sample_rows), out=logits)

    def _routed(self, layer: Layer, moe_idx: int, normed: Tensor) -> Tensor:
        """Return the sum [T, H] of the routed experts of normed [T, H]."""
        assert self._decoder.experts is not None
        return self._decoder.experts.compute(moe_idx, normed, self._decoder.route(layer, normed))

    def _inputs(self, placed: Slices) -> StepInputs:
        device = self._runtime.device
        part = host_part(placed, self._rotary)
        tokens, wanted = (torch.from_numpy(each) for each in (placed.tokens, placed.sample_rows))
        return StepInputs(tokens.to(device), [_on_device(part, device)], wanted.to(device))


def _on_device(part: MicroBatchInputs, device: torch.device) -> MicroBatchInputs:
    """Return the tensors of `part` on `device`."""
    meta = part.meta
    return replace(
        part,
        cos=part.cos.to(device),
        sin=part.sin.to(device),
        kv_slots=part.kv_slots.to(device),
        meta=replace(
            meta,
            query_start=meta.query_start.to(device),
            context_lens=meta.context_lens.to(device),
            block_tables=meta.block_tables.to(device),
            max_query_len=max(meta.max_query_len, MIN_QUERY_BOUND),
            tree_mask=None if meta.tree_mask is None else meta.tree_mask.to(device),
            tree_lens=None if meta.tree_lens is None else meta.tree_lens.to(device),
        ),
    )
