"""The strength of the tests: line coverage by folder, and the share of seeded mutants they kill.

`make coverage` runs the tests with a record of which test ran which line, in child processes too.
This reads it. A mutant is a function's line of the product with one operator, constant or call
changed; it is killed if a test that covers the line fails, or no longer ends in time. Lines that no
Python interpreter runs (numba, Triton) are covered by no test here and get no mutants. The file is
changed in place while the tests run, and restored: the checkout must be clean. Run as
`make coverage mutants`; `ARGS="--mutants 20 --seed 1"` takes fewer, or others.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from coverage import Coverage, CoverageData

CONFIG = Path(__file__).with_name("coverage.ini")
LIMIT_S = 60.0
MOST_TESTS = 20
_PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)),
    *((ast.Is, ast.IsNot), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
)
_SWAPPED = dict([*_PAIRS, *((second, first) for first, second in _PAIRS)])


class Mutant(NamedTuple):
    """One changed expression or statement of a file."""

    file: str
    line: int
    before: str
    after: str
    source: str
    """The whole file, changed."""


def changed(node: ast.AST) -> str | None:
    """Return the text of another expression or statement in the place of `node`, if it has one."""
    match node:
        case ast.Compare(ops=[operator]) | ast.BinOp(op=operator) | ast.BoolOp(op=operator):
            if type(operator) not in _SWAPPED:
                return None
            other = ast.parse(ast.unparse(node), mode="eval").body
            if isinstance(other, ast.Compare):
                other.ops = [_SWAPPED[type(operator)]()]  # type: ignore[list-item]
            else:
                other.op = _SWAPPED[type(operator)]()  # type: ignore[attr-defined]
            return f"({ast.unparse(other)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            return str(not value)
        case ast.Constant(value=int() as value):
            return str(value + 1)
        case ast.Expr(value=ast.Call()):
            return "pass"
    return None


def mutants_of(file: str) -> Iterator[Mutant]:
    """Yield the mutants of a file's functions."""
    text = Path(file).read_text(encoding="utf-8")
    encoded = [line.encode() for line in text.splitlines(keepends=True)]
    starts = [sum(map(len, encoded[:number])) for number in range(len(encoded) + 1)]
    tree, whole = ast.parse(text), text.encode()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node): node for each in functions for part in each.body for node in ast.walk(part)}
    for node in inside.values():
        if not isinstance(node, ast.expr | ast.stmt) or (after := changed(node)) is None:
            continue
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        source = whole[:begin] + after.encode() + whole[end:]
        yield Mutant(file, node.lineno, whole[begin:end].decode(), after, source.decode())


def tests_of_lines(data: CoverageData, file: str) -> dict[int, list[str]]:
    """Return the tests that run each line: `tests/x.py::test_y[case]`, without their phases."""
    contexts = data.contexts_by_lineno(str(Path(file).resolve()))
    return {
        line: sorted({name.split(" (")[0] for name in names} - {""})
        for line, names in contexts.items()
    }


def sample(
    data: CoverageData, folders: Sequence[str], number: int, chance: random.Random
) -> Iterator[tuple[Mutant, list[str]]]:
    """Yield mutants of lines that some test runs, with such tests, an equal share per folder."""
    for idx, folder in enumerate(folders):
        found = [
            (mutant, tests)
            for file in sorted(map(str, Path(folder).rglob("*.py")))
            for covered in [tests_of_lines(data, file)]
            for mutant in mutants_of(file)
            if (tests := covered.get(mutant.line))
        ]
        share = (number + len(folders) - 1 - idx) // len(folders)
        for mutant, tests in chance.sample(found, min(share, len(found))):
            yield mutant, chance.sample(tests, min(MOST_TESTS, len(tests)))


def run(tests: Sequence[str]) -> int | None:
    """Return pytest's status for these tests; None if they do not end in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    pytest = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return pytest.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(pytest.pid, signal.SIGKILL)
        pytest.wait()
        return None


def verdict(mutant: Mutant, tests: Sequence[str]) -> str:
    """Return "killed", "survived", or "undecided" where the tests fail or are slow without it."""
    path = Path(mutant.file)
    before = path.read_bytes()
    try:
        path.write_text(mutant.source, encoding="utf-8")
        status = run(tests)
    finally:
        path.write_bytes(before)
    if status == 0:
        return "survived"
    return "killed" if run(tests) == 0 else "undecided"


def print_coverage(coverage: Coverage, folders: Sequence[str]) -> None:
    """Print the share of each folder's lines that some test runs."""
    for folder in folders:
        lines = missing = 0
        for file in Path(folder).rglob("*.py"):
            _, statements, _, missed, _ = coverage.analysis2(str(file))
            lines, missing = lines + len(statements), missing + len(missed)
        print(f"{folder:18} {lines - missing:6} of {lines:6} statements, {1 - missing / lines:.1%}")


def main() -> int:
    """Print coverage, then each mutant's fate and the share that was killed."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("folders", nargs="+", help="of the product")
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not Path(".coverage").exists():
        raise SystemExit("mutants: nothing is recorded: run make coverage")
    coverage = Coverage(config_file=str(CONFIG))
    coverage.load()
    print_coverage(coverage, args.folders)
    if args.mutants and subprocess.run(["git", "diff", "--quiet"], check=False).returncode:
        raise SystemExit("mutants: the checkout has changes that are not committed")
    fates = []
    chance = random.Random(args.seed)
    for mutant, tests in sample(coverage.get_data(), args.folders, args.mutants, chance):
        fates.append(verdict(mutant, tests))
        place = f"{mutant.file}:{mutant.line}"
        print(f"{fates[-1]:9} {place}: {mutant.before!r} -> {mutant.after!r}", flush=True)
    counts = {fate: fates.count(fate) for fate in ("killed", "survived", "undecided")}
    print(", ".join(f"{count} {fate}" for fate, count in counts.items()), f"of {len(fates)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
