"""Print Python lines per folder and name every file above the limit; never fails.

Run by `make check` with the folders to count. The limit is a growth brake: a file that
passes it wants to be two files.
"""

from __future__ import annotations

import sys
from pathlib import Path

LIMIT = 450


def count_lines(file: Path) -> int:
    """Return the number of lines of `file`."""
    return len(file.read_text(encoding="utf-8").splitlines())


def main(folders: list[str]) -> None:
    """Print one line per folder, and one warning per file above LIMIT lines."""
    total = 0
    for folder in folders:
        lengths = {file: count_lines(file) for file in sorted(Path(folder).rglob("*.py"))}
        total += sum(lengths.values())
        print(f"{folder:18} {sum(lengths.values()):6} lines in {len(lengths)} files")
        for file, length in lengths.items():
            if length > LIMIT:
                print(f"warning: {file} has {length} lines, more than {LIMIT}")
    print(f"{'total':18} {total:6} lines")


if __name__ == "__main__":
    main(sys.argv[1:])
