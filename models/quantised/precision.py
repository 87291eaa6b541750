"""The precision that a checkpoint has, as rules of formats in which kernels serve it.

Owns the choice of a format per layer and part: one that holds the checkpoint's codes, or else loses
nothing that can be seen beside them. Reads no tensor (and imports no torch): names, dtypes and
shapes say it all. Called by `topspin serve` before anything is started, and by draft nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from models.checkpoints.checkpoint_index import TensorEntry, read_index
from models.checkpoints.tensor_names import (
    EMBED,
    LM_HEAD,
    expert_name,
    fused_expert_name,
    layer_name,
)
from models.description.config import ModelConfig
from models.description.parts import LatentConfig
from models.quantised.scheme import Scheme, find_stored
from topspin.plan.precision import (
    CODE_GROUPS,
    KERNEL_FORMATS,
    LM_HEAD_FORMATS,
    UNQUANTISED,
    Format,
    Part,
    PrecisionRule,
    Rules,
)

_FP8_BLOCK: Final = 128


def checkpoint_rules(path: Path, config: ModelConfig) -> dict[str, Rules]:
    """Return, by kernels, the rules by which they serve the checkpoint at `path` as it is.

    Empty if it is not quantised. Raises CheckpointError as
    models.checkpoints.checkpoint_index.read_index.
    """
    if config.quantisation is None:
        return {}
    tensors = read_index(path).tensors
    return {kernels: _rules(_Model(config, tensors, kernels)) for kernels in KERNEL_FORMATS}


def presumed_rules(config: ModelConfig) -> dict[str, Rules]:
    """Return the rules of a checkpoint of which only config.json is there, as it describes them."""
    if config.quantisation is None:
        return {}
    return {kernels: _rules(_Presumed(config, kernels)) for kernels in KERNEL_FORMATS}


class _Model:
    """A checkpoint's formats by part, as one kind of kernels serves them."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, TensorEntry], kernels: str
    ) -> None:
        self.config = config
        self._tensors = tensors
        self._has_fp8 = "fp8" in KERNEL_FORMATS[kernels]
        self._group = CODE_GROUPS[kernels]

    def attention(self, layer: int) -> Format:
        """Return the format of a layer's projections."""
        if self.config.latent is not None:
            return self._latent(layer, self.config.latent)
        q, k, v, o = (layer_name(layer, f"self_attn.{each}_proj.weight") for each in "qkvo")
        sizes = (self.config.q_size, self.config.kv_size)
        # q, k and v are one matrix for kernels, whose fp8 blocks must not span two of them, and
        # hold no zeros in place of values.
        is_whole = all(size % _FP8_BLOCK == 0 for size in sizes) and self.config.value_dim is None
        return self.of_names([q, k, v, o], is_whole=is_whole)

    def _latent(self, layer: int, latent: LatentConfig) -> Format:
        """Return that of projections around latents; those per head are numbers for kernels."""
        first = ("q_proj",) if latent.q_rank is None else ("q_a_proj", "q_b_proj")
        names = (*first, "kv_a_proj_with_mqa", "o_proj")
        first_rows = latent.input_rows(self.config.num_heads) - latent.cached_dim
        return self.of_names(
            [layer_name(layer, f"self_attn.{each}.weight") for each in names],
            is_whole=first_rows % _FP8_BLOCK == 0,
        )

    def mlp(self, layer: int) -> Format | None:
        """Return the format of a layer's dense MLP or shared expert, None if it has neither."""
        moe, blocks = self.config.moe, ["mlp"]
        if self.config.layers[layer].is_moe:
            if moe is None or moe.shared_intermediate_size is None:
                return None
            blocks = [f"{block}.{moe.names.shared}" for block in moe.names.blocks]
        names = [f"{block}.{each}_proj" for block in blocks for each in ("gate", "up", "down")]
        return self.of_names([layer_name(layer, f"{name}.weight") for name in names])

    def expert(self, layer: int, expert: int) -> Format:
        """Return the format of a routed expert."""
        assert self.config.moe is not None
        own = self.config.moe.names
        names = [
            expert_name(layer, block=block, expert_id=expert, projection=projection)
            for block in own.blocks
            for projection in (own.gate, own.up, own.down)
        ]
        stacked = [
            fused_expert_name(layer, block=block, projection=projection)
            for block in own.blocks
            for projection in ("gate_up_proj", "down_proj")
        ]
        return self.of_names(names + stacked)

    def head(self) -> Format:
        """Return that of the LM head, which a tied checkpoint may hold as its embedding."""
        return self.of_names([LM_HEAD, EMBED] if self.config.tie_word_embeddings else [LM_HEAD])

    def of_names(self, names: Iterable[str], *, is_whole: bool = True) -> Format:
        """Return the format that serves all those of the matrices `names` that there are.

        `is_whole` says whether matrices that are joined have whole fp8 blocks.
        """
        found: set[Format] = set()
        for name in names:
            own = self._format_of(name, is_whole)
            if own == UNQUANTISED:
                return UNQUANTISED
            if own is not None:
                found.add(own)
        if not found:
            return UNQUANTISED
        return found.pop() if len(found) == 1 else "int8"

    def _format_of(self, name: str, is_whole: bool) -> Format | None:
        """Return a matrix's format; None: there is no such matrix."""
        stored = find_stored(self._tensors, self.config.quantisation, name)
        if stored is None:
            return UNQUANTISED if name in self._tensors else None
        shape = self._tensors[stored.scales].shape
        return self._format(stored.scheme, shape, is_whole, has_order=stored.order is not None)

    def _format(
        self, scheme: Scheme, shape: Sequence[int], is_whole: bool, *, has_order: bool
    ) -> Format:
        """Return a format that holds the codes, with scales of this shape.

        int8 adds little to the errors of any other.
        """
        if scheme.is_float:
            is_held = math.prod(shape) == 1
            if scheme.block is not None:
                is_held = all(size % _FP8_BLOCK == 0 for size in scheme.block)
            return "fp8" if self._has_fp8 and is_held and is_whole else "int8"
        if scheme.layout in ("mxfp4", "mxfp4_gguf"):
            return "mxfp4"
        if scheme.bits > 4:
            return "int8"
        is_transposed = scheme.layout in ("gptq", "awq")
        has_groups = scheme.group_size is not None and shape[0 if is_transposed else -1] > 1
        is_shuffled = scheme.any_order and has_order
        is_divided = scheme.group_size is None or scheme.group_size % self._group == 0
        return "int4" if not has_groups or (is_divided and not is_shuffled) else "int8"


class _Presumed(_Model):
    """Formats of matrices that nobody has seen, by the checkpoint's own description.

    It has no word for a single expert.
    """

    def __init__(self, config: ModelConfig, kernels: str) -> None:
        super().__init__(config, {}, kernels)
        self._of_layer = cache(partial(super().expert, expert=0))

    def expert(self, layer: int, expert: int) -> Format:
        """Return the format of all routed experts of a layer."""
        return self._of_layer(layer)

    def _format_of(self, name: str, is_whole: bool) -> Format | None:
        described, hidden = self.config.quantisation, self.config.hidden_size
        assert described is not None
        scheme = described.presumed_scheme_of(name.removesuffix(".weight"))
        if scheme is None:
            return UNQUANTISED
        num_groups = -(-hidden // (scheme.group_size or hidden))
        # Without groups and blocks fp8 has one scale, compressed-tensors one per output, as a rule.
        has_outputs = described.method == "compressed-tensors"
        shape = (hidden if has_outputs else num_groups, num_groups)
        return self._format(scheme, shape, is_whole, has_order=scheme.any_order)


def _rules(model: _Model) -> Rules:
    layers = range(model.config.num_layers)
    rules = _of_layers("attention", {idx: model.attention(idx) for idx in layers})
    mlps = {idx: model.mlp(idx) for idx in layers}
    rules += _of_layers("mlp", {idx: each for idx, each in mlps.items() if each is not None})
    rules += _of_experts(model)
    head = model.head()
    if head in LM_HEAD_FORMATS and head != UNQUANTISED:
        rules.append(PrecisionRule(format=head, part="lm_head"))
    return tuple(rules)


def _of_layers(part: Part, formats: Mapping[int, Format]) -> list[PrecisionRule]:
    """Return a rule per format of a part, without layers if all have the same."""
    found = sorted(set(formats.values()) - {UNQUANTISED})
    if len(set(formats.values())) == 1:
        return [PrecisionRule(format=each, part=part) for each in found]
    return [
        PrecisionRule(
            format=each,
            part=part,
            layers=tuple(idx for idx, own in formats.items() if own == each),
        )
        for each in found
    ]


def _of_experts(model: _Model) -> list[PrecisionRule]:
    """Return rules of layers whose experts are alike, and of the experts of the others."""
    config = model.config
    if config.moe is None:
        return []
    alike: dict[int, Format] = {}
    rules: list[PrecisionRule] = []
    for layer in config.moe_layers:
        own = [model.expert(layer, expert) for expert in range(config.moe.num_experts)]
        if len(set(own)) == 1:
            alike[layer] = own[0]
            continue
        rules += [
            PrecisionRule(
                format=each,
                part="experts",
                layers=(layer,),
                experts=tuple(expert for expert, format_ in enumerate(own) if format_ == each),
            )
            for each in sorted(set(own) - {UNQUANTISED})
        ]
    common = _of_layers("experts", alike)
    if rules:
        common = [replace(rule, layers=rule.layers or tuple(alike)) for rule in common]
    return common + rules
