"""Mixed formats against uniform ones of as many bytes, on a model with planted sensitive layers.

And the mean of bits against the bytes of a file.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deploy.placement.sensitivity import Entry, Sensitivity
from deploy.placement.shapes import ModelShape
from deploy.quantisation.grids import Rounding
from deploy.quantisation.mixing import mean_bits, mixed
from deploy.quantisation.sensitivity import find, predicted, sampled
from deploy.quantisation.specification import parse_bits
from deploy.quantisation.writing import write_quantised
from models.description.config import load_model_config
from models.quantised.precision import checkpoint_rules
from tests.checkpoints import make_checkpoint
from tests.deploy.quantisation.sources import NUM_LAYERS, SENSITIVE, divergence, planted
from topspin.plan.precision import Rules, format_of


def tokens(seed: int, count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 64), generator=torch.Generator().manual_seed(seed))


def test_mean_bits_are_those_of_what_is_coded(tmp_path: Path) -> None:
    """The matrices of latents' heads are not: they count neither as bits nor as numbers."""
    source = make_checkpoint(tmp_path / "source", "deepseek_v3", v_head_dim=16, q_lora_rank=32)
    (tmp_path / "coded").mkdir()
    rounding = Rounding(method="nearest", dtype=torch.float32)
    rules = parse_bits("4,attention[0]=8")
    write_quantised(source, tmp_path / "coded", rules, rounding, tokens=tokens(1, 1))

    config = load_model_config(tmp_path / "coded")
    read = checkpoint_rules(tmp_path / "coded", config)["cpu"]
    bits = mean_bits(read, ModelShape.from_config(config), group=32, symmetric=False)

    stored = load_file(tmp_path / "coded" / "model.safetensors")
    numbers = sum(int(each.prod()) for name, each in stored.items() if name.endswith("_shape"))
    # The tiny model's scales have 32 bits, a written checkpoint's usually 16.
    num_bytes = sum(
        each.nbytes / (2 if name.endswith("scale") else 1)
        for name, each in stored.items()
        if name.endswith(("packed", "scale", "point"))
    )
    assert bits == pytest.approx(num_bytes * 8 / numbers)


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
