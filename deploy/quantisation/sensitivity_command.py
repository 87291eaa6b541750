"""`topspin sensitivity`: writes what each layer's part would lose in each format.

Owns the flags, and the file that `topspin plan` reads. Loaded by app.cli when it is run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deploy.quantisation import text
from deploy.quantisation.grids import Rounding
from deploy.quantisation.progress import stages
from deploy.quantisation.sensitivity import find, predicted, sampled
from deploy.quantisation.writing import check_source, scale_dtype
from models.checkpoints.checkpoint import Checkpoint
from models.sources.hub import resolve_model
from topspin.errors import ConfigError

_SAMPLED = 6


def add_arguments(result: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    result.add_argument("model", metavar="MODEL", help="the checkpoint: a directory or a name")
    result.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.json")
    result.add_argument(
        "--measure",
        type=int,
        default=_SAMPLED,
        metavar="N",
        help="layers of each part that are measured; the others follow from them (%(default)s)",
    )
    result.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        default=32,
        help="inputs that share a step in 4 and 8 bits (%(default)s)",
    )
    result.add_argument("--text", type=Path, default=text.CALIBRATION, metavar="FILE")
    result.add_argument("--held-out", type=Path, default=text.HELD_OUT, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status. Raises ConfigError for what cannot be done."""
    if args.measure < 1:
        raise ConfigError(f"--measure {args.measure}: at least one layer of each part is measured")
    path = resolve_model(args.model)
    config = check_source(path)
    known = sampled(config, args.measure)
    held_out = text.tokens_of(path, args.held_out)
    with stages() as begin:
        found = find(
            path,
            calibration=text.tokens_of(path, args.text),
            held_out=held_out,
            measured=known,
            rounding=Rounding(group=args.group_size, dtype=scale_dtype(config)),
            advance=begin("sensitivity", config.num_layers),
        )
    entries = [
        {**single._asdict(), "indicator": found.indicators[single], "kl": kl}
        for single, kl in predicted(found, known).items()
    ]
    result = {
        "model": Checkpoint(path).fingerprint(),
        "positions": held_out.numel(),
        "entries": entries,
    }
    try:
        args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{args.output}: cannot be written: {error}") from error
    print(f"written: {args.output} ({len(entries)} entries)")
    return 0
