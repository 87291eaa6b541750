"""The growth brake: code lines of every folder, against the budget that is committed beside it.

A code line has neither only a comment nor blanks, and belongs to no docstring and no import. Each
line of `.ci/lines.txt` names a folder, the most code lines that it may have, and the issue that
last changed the figure. Run by `make check`; fails if a folder has more, or has no figure. A
folder's growth is an issue's decision: it changes the figure and says which issue it is.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

BUDGET = Path(__file__).with_suffix(".txt")
# A file that passes this many lines, of any kind, wants to be two.
LONG_FILE = 450
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Return the number of code lines of a module's `source`."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _HAVE_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            left_out.update(_lines(node.body[0]))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(_lines(node))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - left_out)


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def read_budget(text: str) -> dict[str, int]:
    """Return the most code lines of each folder; a line is `FOLDER LINES ISSUE`, or a comment."""
    rows = [line.split(maxsplit=2) for line in text.splitlines() if line and line[0] != "#"]
    return {folder: int(lines) for folder, lines, _issue in rows}


def main(folders: list[str]) -> int:
    """Print a line per folder, and return how many folders have no budget or pass theirs."""
    budget = read_budget(BUDGET.read_text(encoding="utf-8"))
    failures = 0
    for folder in folders:
        files = sorted(Path(folder).rglob("*.py"))
        sources = {file: file.read_text(encoding="utf-8") for file in files}
        lines, most = sum(map(code_lines, sources.values())), budget.get(folder)
        print(f"{folder:18} {lines:6} code lines of {most or 'no budget':>6} in {len(files)} files")
        for file, source in sources.items():
            if (length := len(source.splitlines())) > LONG_FILE:
                print(f"warning: {file} has {length} lines, more than {LONG_FILE}")
        if most is None or lines > most:
            print(f"error: {folder} is over its budget in {BUDGET}", file=sys.stderr)
            failures += 1
    return failures


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
