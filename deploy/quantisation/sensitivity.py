"""The loss of each layer's part in each format: an indicator, and the divergence it predicts.

Owns the indicator, measuring single parts, and the prediction of the others. Knows no file of
results. Called by deploy.quantisation.sensitivity_command and by benchmarks.

The indicator of a part is what quantising it alone changes behind its layer: the mean over tokens
of |h' - h|^2 / |h|^2, h [H] being the hidden state. LLM-PQ (Zhao et al., 2024, section 4) sums
s^2 / 12 * Var(x) over the part's numbers instead, which needs no second pass through the layer, but
counts the same error of a large hidden state, which later layers hardly see, as much as of a small
one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deploy.quantisation.forward import LayerInputs, embedded, layer_output
from deploy.quantisation.grids import Rounding, rounded
from deploy.quantisation.layers import DecoderLayer, Model, matrices, open_model
from deploy.quantisation.quality import Judged, ModelOutputs, judge
from deploy.quantisation.rounding import quantised
from kernels.reference import rms_norm
from models.description.config import ModelConfig
from topspin.plan.precision import LM_HEAD_FORMATS, Format, Part, PrecisionRule

FORMATS: Final[tuple[Format, ...]] = ("int8", "int4", "fp8")
# A divergence below this is the rounding of fp32.
_LEAST_KL: Final = 1e-9
_LEAST_INDICATOR: Final = 1e-30


class Single(NamedTuple):
    """One part of one layer (None: the LM head) in one format."""

    layer: int | None
    part: Part
    format: Format


class Found(NamedTuple):
    """Indicators of all singles, and the quality of the model with one of those measured."""

    indicators: Mapping[Single, float]
    measured: Mapping[Single, Judged]


@torch.inference_mode()
def find(
    path: Path,
    *,
    calibration: Tensor,
    held_out: Tensor,
    measured: Collection[tuple[int, Part]],
    rounding: Rounding,
    formats: Sequence[Format] = FORMATS,
    advance: Callable[[], None] = lambda: None,
) -> Found:
    """Take the layers of the checkpoint at `path` once, and return what was found.

    Each layer's part is quantised alone, in each format. If it is in `measured`, its hidden states
    go on beside the original's: memory is that of a layer and of all these hidden states of
    `held_out`.
    Both texts are i64[S, T]. Raises ConfigError for inputs that groups do not divide.
    """
    model = open_model(path)
    config = model.config
    plain, calibrated = embedded(model, held_out), embedded(model, calibration)
    streams: dict[Single, Tensor] = {}
    indicators: dict[Single, float] = {}
    for layer in model.layers:
        inputs = LayerInputs()
        calibrated = layer_output(layer, config, calibrated, inputs)
        for single, hidden in streams.items():
            streams[single] = layer_output(layer, config, hidden)
        output = layer_output(layer, config, plain)
        for part, layers in parts_of(config).items():
            for weight_format in formats if layer.idx in layers else ():
                single = Single(layer.idx, part, weight_format)
                with _alone(layer, config, single, rounding, inputs):
                    changed = layer_output(layer, config, plain)
                indicators[single] = _relative_error(changed, output)
                if (layer.idx, part) in measured:
                    streams[single] = changed
        plain = output
        advance()
    outputs = {single: ModelOutputs(hidden, model.lm_head) for single, hidden in streams.items()}
    normed = rms_norm(plain, model.final_norm, eps=config.rms_norm_eps)
    for single, head in _heads(model, rounding, formats):
        logits = F.linear(normed, model.lm_head)
        indicators[single] = _relative_error(F.linear(normed, head), logits)
        outputs[single] = ModelOutputs(plain, head)
    return Found(indicators, judge(model, ModelOutputs(plain, model.lm_head), outputs, held_out))


def predicted(found: Found, known: Collection[tuple[int, Part]]) -> dict[Single, float]:
    """Return the mean KL that each single adds, by those measured in the `known` layers' parts.

    The divergence per unit of the indicator is interpolated over layers, as a logarithm, for each
    part and format. What was measured stays, and the LM head always is.
    """
    ratios: dict[tuple[Part, Format], dict[int, float]] = defaultdict(dict)
    for single, judged in found.measured.items():
        if single.layer is not None and (single.layer, single.part) in known:
            ratio = max(judged.kl, _LEAST_KL) / max(found.indicators[single], _LEAST_INDICATOR)
            ratios[single.part, single.format][single.layer] = math.log(ratio)
    result = {}
    for single, indicator in found.indicators.items():
        if single.layer is None or (single.layer, single.part) in known:
            result[single] = max(found.measured[single].kl, 0.0)
            continue
        own = ratios[single.part, single.format]
        at = sorted(own)
        log_ratio = np.interp(single.layer, at, [own[each] for each in at])
        result[single] = indicator * math.exp(float(log_ratio))
    return result


def parts_of(config: ModelConfig) -> dict[Part, tuple[int, ...]]:
    """Return the layers that have each part, without the LM head."""
    layers = tuple(range(config.num_layers))
    has_shared = config.moe is not None and config.moe.shared_intermediate_size is not None
    found: dict[Part, tuple[int, ...]] = {
        "attention": layers,
        "mlp": tuple(each for each in layers if has_shared or each not in config.moe_layers),
        "experts": config.moe_layers,
    }
    return {part: own for part, own in found.items() if own}


def sampled(config: ModelConfig, per_part: int) -> frozenset[tuple[int, Part]]:
    """Return `per_part` layers of each part, evenly from its first to its last."""
    return frozenset(
        (layers[int(place)], part)
        for part, layers in parts_of(config).items()
        for place in np.linspace(0, len(layers) - 1, min(per_part, len(layers))).round()
    )


def _relative_error(changed: Tensor, plain: Tensor) -> float:
    """Return the mean over rows [..., N] of |changed - plain|^2 / |plain|^2."""
    errors = (changed - plain).square().sum(-1) / plain.square().sum(-1)
    return float(errors.mean())


@contextmanager
def _alone(
    layer: DecoderLayer,
    config: ModelConfig,
    single: Single,
    rounding: Rounding,
    inputs: LayerInputs,
) -> Iterator[None]:
    """Quantise one part of a layer while the block runs."""
    own = [each.weight for each in matrices(layer, config) if each.part == single.part]
    kept = [weight.clone() for weight in own]
    rules = (PrecisionRule(format=single.format, part=single.part),)
    for _ in quantised(layer, config, rules, rounding, inputs):
        pass
    yield
    for weight, before in zip(own, kept, strict=True):
        weight.copy_(before)


def _heads(
    model: Model, rounding: Rounding, formats: Sequence[Format]
) -> Iterator[tuple[Single, Tensor]]:
    """Yield the LM head in each format that it can have, as numbers."""
    for weight_format in formats:
        if weight_format in LM_HEAD_FORMATS:
            coded = rounded(model.lm_head, weight_format, rounding)
            yield Single(None, "lm_head", weight_format), coded.numbers()
