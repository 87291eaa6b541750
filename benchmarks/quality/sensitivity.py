"""Does the sensitivity of layers tell what quantising them costs, and do mixed formats pay?

Three questions, over deploy/quantisation/held_out.txt. The formats are those that `topspin
quantize` writes; KL is the mean divergence from the model in fp32, in nats per token.

* Ranks: each part of a sample of layers alone in int4, and alone in int8. Spearman's rank
  correlation of what was measured (KL, and perplexity) with the indicator, and with the KL that
  `topspin sensitivity` predicts for layers from a few others; the mean absolute error of that
  prediction's logarithm (base 2: doublings).
* Sums: of the single parts' KL, measured and predicted, against the KL of all together.
* Mixed: `--mean-bits` by the prediction against the same format mix laid out without it, as many
  bytes each: 8 bits for attention, for every second layer, or for one half of the layers. With
  compensated rounding, and for some to the nearest.

Run as `topspin bench sensitivity`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks.experiment import Experiment, Result, TextTable, say, table
from deploy.placement.sensitivity import Entry, Sensitivity
from deploy.placement.shapes import ModelShape
from deploy.quantisation import text
from deploy.quantisation.forward import LayerInputs, embedded, last_hidden, layer_output
from deploy.quantisation.grids import METHODS, Rounding
from deploy.quantisation.layers import open_model
from deploy.quantisation.mixing import mean_bits, mixed
from deploy.quantisation.progress import stages
from deploy.quantisation.quality import Judged, ModelOutputs, judge
from deploy.quantisation.rounding import quantised
from deploy.quantisation.sensitivity import Single, find, parts_of, predicted, sampled
from deploy.quantisation.specification import parse_bits
from deploy.quantisation.writing import scale_dtype
from models.description.config import ModelConfig, load_model_config
from models.sources.hub import DEFAULT_MODEL, resolve_model
from topspin.plan.precision import UNQUANTISED, Format, Rules, format_of

FORMATS: tuple[Format, ...] = ("int4", "int8")
Row = Mapping[str, Any]


class Judge:
    """Quantises a model by rules, without writing it, and compares it with the original."""

    def __init__(self, path: Path, calibration: Tensor, held_out: Tensor) -> None:
        self._path, self._calibration, self._held_out = path, calibration, held_out
        self._model = open_model(path)
        self._plain = ModelOutputs(last_hidden(self._model, held_out), self._model.lm_head)

    @torch.inference_mode()
    def __call__(self, rules: Rules, rounding: Rounding) -> Judged:
        """Return the quality of the model that `topspin quantize` would write."""
        other = open_model(self._path)
        is_compensated = rounding.method == "compensated"
        hidden = embedded(other, self._held_out)
        calibrated = embedded(other, self._calibration)
        for layer in other.layers:
            inputs = LayerInputs()
            if is_compensated:
                layer_output(layer, other.config, calibrated, inputs)
            for _ in quantised(layer, other.config, rules, rounding, inputs):
                pass
            if is_compensated:
                calibrated = layer_output(layer, other.config, calibrated)
            hidden = layer_output(layer, other.config, hidden)
        found = {"": ModelOutputs(hidden, other.lm_head)}
        return judge(self._model, self._plain, found, self._held_out)[""]


def layout(result: Result) -> Iterator[TextTable]:
    """Yield the divergence of mixed and uniform formats, and how well it was predicted."""
    columns = {
        "formats": "{name}",
        "bits per number": "{mean_bits:.2f}",
        "rounding": "{rounding}",
        "KL, nats per token": "{kl:.4f}",
        "perplexity": "{perplexity:.2f}",
    }
    yield table(columns, result["layouts"])
    kinds = {
        "indicator_kl": "indicator and KL",
        "indicator_perplexity": "indicator and perplexity",
        "predicted_kl": "prediction and KL, of layers not measured",
    }
    yield TextTable(
        ["Spearman's rank correlation", *(each["format"] for each in result["ranks"])],
        [
            [name, *(f"{each[kind]:.2f}" for each in result["ranks"])]
            for kind, name in kinds.items()
        ],
    )
    columns = {
        "formats": "{name}",
        "KL": "{kl:.4f}",
        "sum of single parts": "{sum_kl:.4f}",
        "of predictions": "{predicted_kl:.4f}",
    }
    yield table(columns, result["sums"])


EXPERIMENT = Experiment("sensitivity", __doc__, layout)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the result."""
    parser = EXPERIMENT.parser(model=DEFAULT_MODEL)
    parser.add_argument("--layers", type=int, default=15, help="of each part (%(default)s)")
    parser.add_argument("--known", type=int, default=6, help="to predict from (%(default)s)")
    parser.add_argument("--group-size", type=int, default=32, help="(%(default)s)")
    args = parser.parse_args(argv)
    path = resolve_model(args.model)
    config = load_model_config(path)
    calibration = text.tokens_of(path, text.CALIBRATION)
    held_out = text.tokens_of(path, text.HELD_OUT)
    rounding = Rounding(group=args.group_size, dtype=scale_dtype(config))
    few, many = sampled(config, args.known), sampled(config, args.layers)
    with stages() as begin:
        found = find(
            path,
            calibration=calibration,
            held_out=held_out,
            measured=few | many,
            rounding=rounding,
            formats=FORMATS,
            advance=begin("sensitivity", config.num_layers),
        )
    guessed, singles = predicted(found, few), predicted(found, few | many)
    rows = [
        {
            **single._asdict(),
            **judged._asdict(),
            "predicted_kl": guessed[single],
            "indicator": found.indicators[single],
            "is_known": (single.layer, single.part) in few,
        }
        for single, judged in found.measured.items()
        if single.layer is not None
    ]
    ranks = [correlations(rows, each) for each in FORMATS]
    judged_by = Judge(path, calibration, held_out)
    shape = ModelShape.from_config(config)
    entries = (Entry(**each._asdict(), indicator=0.0, kl=kl) for each, kl in guessed.items())
    sensitivity = Sensitivity(tuple(entries), shape)
    sums, layouts = [], []
    for name, rules, methods in cases(config, shape, sensitivity, rounding):
        for method in methods:
            judged = judged_by(rules, replace(rounding, method=method))
            bits = mean_bits(rules, shape, group=rounding.group, symmetric=False)
            named = {"name": name, "rounding": method, "mean_bits": bits}
            layouts.append({**named, **judged._asdict()})
            say(f"{name}, {method}: KL {judged.kl:.4g}")
            if method == rounding.method:
                total, guess = (_sum(each, config, rules) for each in (singles, guessed))
                sums.append({"name": name, "sum_kl": total, "predicted_kl": guess, "kl": judged.kl})
    settings = {
        "model": Path(args.model).name,
        "group_size": args.group_size,
        "measured_layers": args.layers,
        "known_layers": args.known,
        "positions": held_out.numel(),
        "calibration_positions": calibration.numel(),
    }
    result = {"settings": settings, "ranks": ranks, "sums": sums, "layouts": layouts, "rows": rows}
    return EXPERIMENT.finish(args, result)


def cases(
    config: ModelConfig, shape: ModelShape, sensitivity: Sensitivity, rounding: Rounding
) -> list[tuple[str, Rules, Sequence[Any]]]:
    """Return (name, rules, ways of rounding) of what is compared, equal bytes in turn."""
    layers, once = range(config.num_layers), METHODS[:1]
    half = config.num_layers // 2

    def eight(chosen: Sequence[int]) -> Rules:
        spec = ",".join(map(str, chosen))
        return parse_bits("4," + ",".join(f"{part}[{spec}]=8" for part in parts_of(config)))

    of_attention, even = parse_bits("4,attention=8"), eight(layers[::2])

    def mixed_as(rules: Rules) -> Rules:
        bits = mean_bits(rules, shape, group=rounding.group, symmetric=False)
        formats = mixed(shape, sensitivity, bits, group=rounding.group, symmetric=False)
        say(f"{bits:.3f} bits: {formats}")
        return formats.rules()

    return [
        ("all int8", parse_bits("8"), once),
        ("all int4", parse_bits("4"), METHODS),
        ("attention int8", of_attention, METHODS),
        ("mixed, as many bytes", mixed_as(of_attention), METHODS),
        ("even layers int8", even, METHODS),
        ("odd layers int8", eight(layers[1::2]), once),
        ("first layers int8", eight(layers[:half]), once),
        ("last layers int8", eight(layers[half:]), once),
        ("mixed, as many bytes", mixed_as(even), METHODS),
    ]


def _sum(kls: Mapping[Single, float], config: ModelConfig, rules: Rules) -> float:
    """Return the sum of the single parts' divergences that rules quantise."""
    total = 0.0
    for part, layers in parts_of(config).items():
        for layer in layers:
            name = format_of(rules, part, layer, 0 if part == "experts" else None)
            total += 0.0 if name == UNQUANTISED else kls[Single(layer, part, name)]
    return total


def correlations(rows: Sequence[Row], weight_format: Format) -> dict[str, str | float]:
    """Return a format's rank correlations and the error of its predictions.

    Predictions are those of layers that were not known. A rank correlation of equal values is NaN.
    """
    rows = [row for row in rows if row["format"] == weight_format]
    unknown = [row for row in rows if not row["is_known"]]
    doublings = [abs(math.log2(row["predicted_kl"] / row["kl"])) for row in unknown]
    result: dict[str, str | float] = {"format": weight_format}
    for measure in ("kl", "perplexity"):
        result[f"indicator_{measure}"] = _spearman(rows, "indicator", measure)
        result[f"predicted_{measure}"] = _spearman(unknown, "predicted_kl", measure)
    for part in sorted({row["part"] for row in rows}):
        own = [row for row in rows if row["part"] == part]
        result[f"indicator_kl_of_{part}"] = _spearman(own, "indicator", "kl")
    result["mean_doublings"] = sum(doublings) / max(len(doublings), 1)
    return result


def _spearman(rows: Sequence[Row], name: str, measure: str) -> float:
    found = spearmanr([row[name] for row in rows], [row[measure] for row in rows])
    return float(found.statistic)


if __name__ == "__main__":
    raise SystemExit(main())
