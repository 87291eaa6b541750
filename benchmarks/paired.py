"""The speed of this checkout against another one's, by any benchmark that both have.

Runs the same command in each, in turn, and compares every number of the results that has a unit
(its key ends in one) and stands at the same place: medians over the rounds, and their ratio. The
other checkout has its `.venv` and writes into its own `benchmarks/results`. Run as
`python -m benchmarks.paired TREE RESULT -- bench m2n --rounds 1`: the words behind -- are those of
`topspin`, or begin with `-m MODULE` for one of `python`; RESULT is the name of the file that the
command writes.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.experiment import Experiment, Result, TextTable, rounds_in_turn, spread, table
from topspin.errors import ConfigError

ROOT: Final = Path(__file__).parents[1]
_HAS_UNIT: Final = re.compile(r"(_|^)(s|ms|us|seconds|mb|mib|per_s|p50|p99)(_|$)")
_NO_FIGURES: Final = ("machine", "versions", "settings")


def figures_of(result: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield the place and the value of each figure of a result's JSON."""
    if isinstance(result, dict):
        for key, value in result.items():
            if key not in _NO_FIGURES:
                yield from figures_of(value, f"{place}.{key}" if place else key)
    elif isinstance(result, list):
        for idx, value in enumerate(result):
            # What was measured is in texts and whole numbers, its figures are fractions.
            about = value.values() if isinstance(value, dict) else ()
            texts = [str(each) for each in about if isinstance(each, str | int)][:3]
            yield from figures_of(value, f"{place}[{' '.join([str(idx), *texts])}]")
    elif isinstance(result, int | float) and any(map(_HAS_UNIT.search, re.split(r"[.\[]", place))):
        yield place, float(result)


def run(tree: Path, name: str, words: Sequence[str]) -> dict[str, float]:
    """Run a command of a checkout, and return the figures of the result that it writes."""
    binaries = tree / ".venv" / "bin"
    python = [str(binaries / "python"), "-P"] if words[0] == "-m" else [str(binaries / "topspin")]
    path = tree / "benchmarks" / "results" / f"{name}.json"
    kept = path.read_bytes() if path.exists() else None
    try:
        subprocess.run([*python, *words], cwd=tree, check=True, stdout=sys.stderr)
        return dict(figures_of(json.loads(path.read_text(encoding="utf-8"))))
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        raise ConfigError(f"{tree}: {error}") from None
    finally:
        if kept is not None:
            path.write_bytes(kept)


def layout(result: Result) -> Iterator[TextTable]:
    """Yield the ratios of the figures of one name; each figure is in the file only."""
    ratios: dict[str, list[float]] = {}
    for each in result["figures"]:
        if not math.isnan(each["ratio"]):
            ratios.setdefault(each["figure"].rpartition(".")[2], []).append(each["ratio"])
    columns = {
        "now / before": "{name}",
        "figures": "{count}",
        "median": "{median:.3f}",
        "least": "{least:.3f}",
        "greatest": "{greatest:.3f}",
    }
    rows = ({"name": name, "count": len(of), **spread(of)._asdict()} for name, of in ratios.items())
    yield table(columns, rows)


EXPERIMENT = Experiment(
    "paired", __doc__, layout, command="python -m benchmarks.paired TREE RESULT --"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both in turn, print a table, write the result."""
    given = list(sys.argv[1:] if argv is None else argv)
    if "--" not in given:
        raise SystemExit("paired: the command stands behind --")
    parser = EXPERIMENT.parser(rounds=3)
    parser.add_argument("tree", type=Path, help="the other checkout, with its .venv")
    parser.add_argument("result", help="the name of the file that the command writes")
    args = parser.parse_args(given[: given.index("--")])
    words = given[given.index("--") + 1 :]
    rounds = rounds_in_turn(
        {"before": args.tree.resolve(), "now": ROOT},
        lambda tree, _: run(tree, args.result, words),
        rounds=args.rounds,
        warm_ups=0,
    )
    both = [name for name in rounds[0]["now"] if all(name in each["before"] for each in rounds)]
    figures = []
    for name in both:
        before, now = (
            statistics.median(each[side][name] for each in rounds) for side in ("before", "now")
        )
        ratio = now / before if before else float("nan")
        figures.append({"figure": name, "before": before, "now": now, "ratio": ratio})
    about = {"command": words, "rounds": args.rounds, "tree": str(args.tree.name)}
    return EXPERIMENT.finish(args, {**about, "figures": figures})


if __name__ == "__main__":
    raise SystemExit(main())
