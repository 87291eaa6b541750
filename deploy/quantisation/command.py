"""`topspin quantize`: writes a quantised checkpoint and measures what that costs in quality.

Owns the flags and what is printed. Loaded by app.cli when it is run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.placement.sensitivity import read_sensitivity
from deploy.placement.shapes import ModelShape
from deploy.quantisation import text
from deploy.quantisation.grids import METHODS, Rounding
from deploy.quantisation.mixing import mixed
from deploy.quantisation.progress import stages
from deploy.quantisation.quality import check_bound, compare
from deploy.quantisation.specification import BITS_HELP, parse_bits
from deploy.quantisation.writing import (
    check_request,
    new_directory,
    scale_dtype,
    write_quantised,
)
from models.checkpoints.checkpoint_index import read_index
from models.checkpoints.fingerprint import digests_of, fingerprint_of
from models.description.config import load_model_config
from models.sources.hub import resolve_model
from topspin.errors import ConfigError
from topspin.plan.file import read_plan
from topspin.plan.precision import Rules


def add_arguments(result: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    result.add_argument("model", metavar="MODEL", help="the checkpoint: a directory or a name")
    what = result.add_mutually_exclusive_group(required=True)
    what.add_argument("--bits", metavar="SPEC", help=BITS_HELP)
    what.add_argument("--plan", metavar="PLAN", help="the precision of a plan, and its bound")
    what.add_argument(
        "--mean-bits",
        type=float,
        metavar="X",
        help="int4, int8 and none by --sensitivity, with X bits per number, scales included",
    )
    result.add_argument(
        "--sensitivity",
        type=Path,
        metavar="FILE.json",
        help="for --mean-bits: what `topspin sensitivity` wrote, with the same --group-size",
    )
    result.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    result.add_argument(
        "--max-kl",
        type=float,
        metavar="X",
        help="fail above this mean KL in nats per token (the plan's, or no bound)",
    )
    result.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        default=32,
        help="inputs that share a step in 4 and 8 bits; GPUs need 128 (%(default)s)",
    )
    result.add_argument(
        "--symmetric",
        action="store_true",
        help="4 bits without zero points, which some engines ask for; loses more",
    )
    result.add_argument(
        "--rounding", choices=METHODS, default=METHODS[0], help="of 4 bits (%(default)s)"
    )
    result.add_argument(
        "--text",
        type=Path,
        default=text.CALIBRATION,
        metavar="FILE",
        help="text to calibrate with (a small one of many kinds)",
    )
    result.add_argument(
        "--held-out",
        type=Path,
        default=text.HELD_OUT,
        metavar="FILE",
        help="another text, to measure with",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status. Raises ConfigError and QualityMissed."""
    if args.max_kl is not None and not args.max_kl >= 0:
        raise ConfigError(f"--max-kl {args.max_kl}: must be 0 or more")
    if (args.mean_bits is None) != (args.sensitivity is None):
        raise ConfigError("--mean-bits and --sensitivity go together")
    source = resolve_model(args.model)
    rules, max_kl = _request(args, source)
    config = check_request(source, rules)
    rounding = Rounding(
        method=args.rounding,
        group=args.group_size,
        symmetric=args.symmetric,
        dtype=scale_dtype(config),
    )
    calibration, held_out = (text.tokens_of(source, each) for each in (args.text, args.held_out))
    with new_directory(args.output) as directory:
        with stages() as begin:
            write_quantised(
                source,
                directory,
                rules,
                rounding,
                tokens=calibration,
                advance=begin("quantise", config.num_layers),
            )
            quality = compare(
                source, directory, held_out, advance=begin("measure", 2 * config.num_layers)
            )
        print(
            f"mean KL {quality.kl:.4g} nats per token, perplexity {quality.perplexity:.4f} "
            f"(original {quality.original_perplexity:.4f}), over {quality.positions} tokens of "
            f"{args.held_out.name}",
            flush=True,
        )
        check_bound(quality, max_kl)
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    print(f"written: {args.output} ({size / 2**20:.0f} MiB of weights)")
    return 0


def _request(args: argparse.Namespace, source: Path) -> tuple[Rules, float | None]:
    """Return the rules and the bound that were asked for."""
    if args.mean_bits is not None:
        shape = ModelShape.from_config(load_model_config(source))
        fingerprint = fingerprint_of(digests_of(read_index(source)))
        formats = mixed(
            shape,
            read_sensitivity(args.sensitivity, shape, fingerprint=fingerprint),
            args.mean_bits,
            group=args.group_size,
            symmetric=args.symmetric,
        )
        print(f"{formats}: predicted KL {formats.kl:.4g}", flush=True)
        return formats.rules(), args.max_kl
    if args.plan is None:
        return parse_bits(args.bits), args.max_kl
    plan = read_plan(args.plan)
    if not plan.precision:
        raise ConfigError(f"--plan {args.plan}: its precision quantises nothing")
    of_plan = None if plan.expected is None else plan.expected.max_kl
    return plan.precision, of_plan if args.max_kl is None else args.max_kl
