"""Does the sensitivity of layers tell what quantising them costs, and do mixed bits pay?

Measures the divergence (mean KL over deploy/quantisation/held_out.txt) of the model with each
part of a sample of its layers alone in int4. Beside them stand the indicator, and the divergence
that `topspin sensitivity` predicts from a few of them: rank correlations (Spearman) of both with
what was measured, and the mean absolute error of the predicted logarithm (base 2: doublings).
Then, per rule set of several parts, the sum of the predictions against the measured divergence. Run
as `topspin bench sensitivity`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

from benchmarks import report
from deploy.quantisation import text
from deploy.quantisation.forward import divergences, embedded, last_hidden, layer_output
from deploy.quantisation.inputs import LayerInputs
from deploy.quantisation.layers import open_model
from deploy.quantisation.progress import stages
from deploy.quantisation.rounding import Rounding, quantised
from deploy.quantisation.sensitivity import Single, find, parts_of, predicted, sampled
from deploy.quantisation.specification import parse_bits
from models.config import load_model_config
from models.hub import DEFAULT_MODEL, resolve_model
from topspin.precision import Rules, format_of

MIXED = ("experts=4", "attention=4", "4,attention=none", "4")


@torch.inference_mode()
def measured_kl(path: Path, rules: Rules, rounding: Rounding, tokens: Mapping[str, Any]) -> float:
    """Return the mean KL of the model quantised by `rules`, without writing it."""
    plain, other = open_model(path), open_model(path)
    expected = last_hidden(plain, tokens["held_out"])
    found, calibrated = embedded(other, tokens["held_out"]), embedded(other, tokens["calibration"])
    for layer in other.layers:
        inputs = LayerInputs(with_hessians=True)
        layer_output(layer, other.config, calibrated, inputs)
        for _ in quantised(layer, other.config, rules, rounding, inputs):
            pass
        calibrated = layer_output(layer, other.config, calibrated)
        found = layer_output(layer, other.config, found)
    return divergences((plain, expected, None), (other, found, None)).mean().item()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(prog="topspin bench sensitivity", description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL")
    parser.add_argument("--layers", type=int, default=15, help="of each part (%(default)s)")
    parser.add_argument("--known", type=int, default=6, help="to predict from (%(default)s)")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args(argv)
    path = resolve_model(args.model)
    config = load_model_config(path)
    tokens = {
        "calibration": text.tokens_of(path, text.CALIBRATION),
        "held_out": text.tokens_of(path, text.HELD_OUT),
    }
    rounding = Rounding()
    few, many = sampled(config, args.known), sampled(config, args.layers)
    with stages() as begin:
        found = find(
            path,
            **tokens,
            measured=few | many,
            rounding=rounding,
            formats=("int4",),
            advance=begin("sensitivity", config.num_layers),
        )
    guessed = predicted(found, few)
    rows = []
    for single, kl in found.measured.items():
        if single.layer is not None:
            rows.append(
                {
                    **single._asdict(),
                    "kl": kl,
                    "predicted_kl": guessed[single],
                    "indicator": found.indicators[single],
                    "is_known": (single.layer, single.part) in few,
                }
            )
    ranks = correlations(rows)
    print("  ".join(f"{name} {value:.3f}" for name, value in ranks.items()))
    mixed = []
    for bits in MIXED:
        rules = parse_bits(bits)
        total = sum(
            guessed[Single(layer, part, "int4")]
            for part, layers in parts_of(config).items()
            for layer in layers
            if format_of(rules, part, layer) == "int4"
        )
        kl = measured_kl(path, rules, rounding, tokens)
        mixed.append({"bits": bits, "predicted_kl": total, "kl": kl})
        print(f"{bits}: KL {kl:.4g}, predicted {total:.4g}", flush=True)
    if not args.no_write:
        settings = {"model": Path(args.model).name, "positions": tokens["held_out"].numel()}
        result = {"settings": settings, "ranks": ranks, "mixed": mixed, "rows": rows}
        print(f"written: {report.write('sensitivity', result).name}")
    return 0


def correlations(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return Spearman's rank correlations with the measured KL, and the error of predictions."""
    unknown = [row for row in rows if not row["is_known"]]
    doublings = [abs(math.log2(row["predicted_kl"] / row["kl"])) for row in unknown]
    result = {
        "spearman_indicator": _spearman(rows, "indicator"),
        "spearman_predicted_unknown": _spearman(unknown, "predicted_kl"),
        "mean_doublings_unknown": sum(doublings) / max(len(doublings), 1),
    }
    for part in sorted({row["part"] for row in rows}):
        own = [row for row in rows if row["part"] == part]
        result[f"spearman_indicator_{part}"] = _spearman(own, "indicator")
    return result


def _spearman(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    found = spearmanr([row[name] for row in rows], [row["kl"] for row in rows])
    return float(found.statistic)


if __name__ == "__main__":
    raise SystemExit(main())
