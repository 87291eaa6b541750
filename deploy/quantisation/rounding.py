"""Quantises the matrices of a layer, each in the format that the rules give it.

Owns the choice between rounding to the nearest and compensated rounding, and doing many experts at
once. A layer's weights become the numbers of the codes, so that what follows sees their errors.
Knows no file. Called by deploy.quantisation's writing and sensitivity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from deploy.quantisation.compensated import compensated, inverse_factor
from deploy.quantisation.forward import LayerInputs
from deploy.quantisation.grids import Coded, Rounding, check_size, rounded
from deploy.quantisation.layers import EXPERT_GATE_UP, DecoderLayer, Matrix, matrices
from models.description.config import ModelConfig
from topspin.plan.precision import UNQUANTISED, Format, Rules, format_of

# Numbers that are rounded at once, in fp32 and some copies.
_NUMBERS_AT_ONCE: Final = 1 << 25


def quantised(
    layer: DecoderLayer,
    config: ModelConfig,
    rules: Rules,
    rounding: Rounding,
    inputs: LayerInputs | None,
) -> Iterator[tuple[str, Coded]]:
    """Yield the modules (published names) of a layer that the rules quantise, with their codes.

    Their weights in `layer` are replaced meanwhile. `inputs` are needed for
    compensated rounding only. Raises ConfigError for inputs that groups do not divide.
    """

    def format_(matrix: Matrix) -> Format:
        return format_of(rules, matrix.part, layer.idx, matrix.expert)

    wanted = [each for each in matrices(layer, config) if format_(each) != UNQUANTISED]
    wanted.sort(key=lambda each: (each.source, format_(each)))
    for (_, weight_format), some in groupby(wanted, key=lambda each: (each.source, format_(each))):
        alike = list(some)
        num_in, name = alike[0].weight.shape[1], alike[0].modules[0].name
        check_size(num_in, weight_format, group=rounding.group, name=name)
        for batch in _batches(alike):
            yield from _round(batch, weight_format, rounding, inputs)


def _batches(alike: Sequence[Matrix]) -> Iterator[Sequence[Matrix]]:
    """Split matrices of one shape into what is rounded at once."""
    step = max(_NUMBERS_AT_ONCE // alike[0].weight.numel(), 1)
    for start in range(0, len(alike), step):
        yield alike[start : start + step]


def _round(
    batch: Sequence[Matrix],
    weight_format: Format,
    rounding: Rounding,
    inputs: LayerInputs | None,
) -> Iterator[tuple[str, Coded]]:
    is_compensated = rounding.method == "compensated" and weight_format == "int4"
    if is_compensated:
        assert inputs is not None
        weights = torch.stack([each.weight for each in batch])
        coded = compensated(weights, _factors(batch, inputs), weight_format, rounding)
    for idx, matrix in enumerate(batch):
        for name, rows in matrix.modules:
            if is_compensated:
                own = part_of(coded, idx, rows)
            else:
                own = rounded(matrix.weight[rows], weight_format, rounding)
            matrix.weight[rows] = own.numbers()
            yield name, own


def part_of(coded: Coded, idx: int, rows: slice | Tensor) -> Coded:
    """Return some rows of one of several matrices in an integer format."""
    assert coded.zeros is not None
    return replace(
        coded,
        codes=coded.codes[idx, rows],
        scales=coded.scales[idx, rows],
        zeros=coded.zeros[idx, rows],
    )


def _factors(batch: Sequence[Matrix], inputs: LayerInputs) -> Tensor:
    """Return the factors [B, I, I] of a batch, [1, I, I] if all have the same input."""
    is_common = batch[0].source == EXPERT_GATE_UP
    some = batch[:1] if is_common else batch
    return inverse_factor(torch.stack([inputs.hessian(each.source, each.expert) for each in some]))
