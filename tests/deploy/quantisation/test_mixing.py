"""Mixed formats against uniform ones of as many bytes, on a model with planted sensitive layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deploy.placement.sensitivity import Entry, Sensitivity
from deploy.placement.shapes import ModelShape
from deploy.quantisation.grids import Rounding
from deploy.quantisation.mixing import mean_bits, mixed
from deploy.quantisation.sensitivity import find, predicted, sampled
from deploy.quantisation.specification import parse_bits
from deploy.quantisation.writing import write_quantised
from models.description.config import load_model_config
from tests.deploy.quantisation.sources import NUM_LAYERS, SENSITIVE, divergence, planted
from topspin.plan.precision import Rules, format_of


def tokens(seed: int, count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 64), generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
def test_mixed_beats_uniform_at_equal_bytes(tmp_path: Path) -> None:
    """Of layers that were not measured, the indicator finds those that were planted.

    The others are int4 in groups half as large, which have more bytes than the mixed checkpoint,
    and 8 bits for one whole layer, any of them, which is as many bytes as the mixed one's.
    """
    source = planted(tmp_path / "source")
    config = load_model_config(source)
    shape = ModelShape.from_config(config)
    calibration, held_out = tokens(1, 8), tokens(2, 4)
    known = sampled(config, 3)
    assert not known & set(SENSITIVE)
    rounding = Rounding(dtype=torch.float32)
    found = find(
        source,
        calibration=calibration,
        held_out=held_out,
        measured=known,
        rounding=rounding,
        formats=("int8", "int4"),
    )
    entries = (
        Entry(**single._asdict(), indicator=0.0, kl=kl)
        for single, kl in predicted(found, known).items()
    )
    sensitivity = Sensitivity(tuple(entries), shape)

    def written(rules: Rules, group: int = 32) -> tuple[float, int]:
        """Return a written checkpoint's divergence and bytes."""
        coded = tmp_path / f"coded-{len(list(tmp_path.iterdir()))}"
        coded.mkdir()
        write_quantised(
            source,
            coded,
            rules,
            Rounding(dtype=torch.float32, group=group),
            tokens=calibration,
        )
        size = (coded / "model.safetensors").stat().st_size
        return divergence(source, coded, held_out), size

    whole_layers = [
        parse_bits(f"4,attention[{layer}]=8,experts[{layer}]=8") for layer in range(NUM_LAYERS)
    ]
    bits = mean_bits(whole_layers[0], shape, group=32, symmetric=False)
    rules = mixed(shape, sensitivity, bits, group=32, symmetric=False).rules()
    assert {
        (layer, part)
        for layer in range(NUM_LAYERS)
        for part in ("attention", "experts")
        if format_of(rules, part, layer, 0) == "int8"
    } == set(SENSITIVE)
    kl, size = written(rules)
    others = [written(parse_bits("4"), group=16), *map(written, whole_layers)]
    assert size <= min(other for _, other in others) * 1.001
    assert kl < 0.7 * min(other for other, _ in others)
