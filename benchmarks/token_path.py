"""The files and functions that one streamed token passes.

Runs `topspin serve` over several processes with a recorder in each (benchmarks/path_recorder),
streams the same chat several times, and prints the product's functions that every one of them
called, from the request's first byte to the last event, in the order of their first calls. Those
that are called as well while nobody asks for anything, to wait or to look after time limits, are
left out, and so is the wait of a node for rows that do not come in the time that compiled code
waits for them: how often that happens is the machine's load. With `--write` the list replaces the
one of docs/architecture.md. Functions that are compiled (numba) are called by none of Python's, and
not seen. Run as `make map`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from benchmarks.path_recorder.sitecustomize import FOLDER_VARIABLE, LAST
from benchmarks.servers.topspin import TopspinServer

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "architecture.md"
BEGIN: Final = "<!-- the path of a token, written by `make map` -->\n"
END: Final = "<!-- its end -->\n"
MULTI_PROCESS: Final = ("--transport", "shm", "--layout", "shared")
"""The layout of `topspin serve` where it runs one process per node."""
PRODUCT: Final = (
    *("app", "topspin", "models", "kernels", "m2n_comm", "spec_decode", "attention_nodes"),
    *("expert_nodes", "draft_nodes", "server", "deploy"),
)
LONG_WAITS: Final = ("m2n_comm/host/shm.py", "m2n_comm/host/frames/memory_order.py")
WINDOWS: Final = 24
WARM_UPS: Final = 3
TIMEOUT_S: Final = 120.0
_AFTERWARDS_S: Final = 0.05
"""The end of a window behind the last event: logs and metrics are written, blocks are freed."""
_POLL_S: Final = 0.05


class Visit(NamedTuple):
    """A file of the product in one process, and its functions in the order of their first calls."""

    process: str
    """The module that the process runs."""
    file: str
    functions: tuple[str, ...]


class _Window:
    """The byte that opens and closes windows in all processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "window").write_bytes(b"\0")

    def _set(self, number: int) -> None:
        # Into the file, not over it: the processes have mapped it.
        with (self._folder / "window").open("r+b") as file:
            file.write(bytes([number]))

    @contextmanager
    def open(self, number: int) -> Iterator[None]:
        self._set(number)
        try:
            yield
        finally:
            self._set(0)

    def records(self) -> list[dict[str, object]]:
        """Have all processes write, and return what they recorded."""
        self._set(LAST)
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            alive = [
                begun
                for begun in self._folder.glob("*.begun")
                if Path(f"/proc/{begun.stem}").exists()
            ]
            if all(begun.with_suffix(".json").exists() for begun in alive):
                files = sorted(self._folder.glob("*.json"))
                return [json.loads(file.read_text(encoding="utf-8")) for file in files]
            time.sleep(_POLL_S)
        raise SystemExit("a process has not written its calls")


def stream(url: str) -> None:
    """Stream one chat of two tokens to its end."""
    body = {
        "messages": [{"role": "user", "content": "Count to three."}],
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S) as sent:
        sent.raise_for_status()
        assert any(line == "data: [DONE]" for line in sent.iter_lines())


def follow(model: str, flags: Sequence[str] = MULTI_PROCESS) -> list[Visit]:
    """Return the files that every one of several equal streams passes, in order."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        window = _Window(folder)
        recorder = Path(__file__).parent / "path_recorder"
        topspin = TopspinServer([model, *flags])
        topspin.words[:0] = ["env", f"{FOLDER_VARIABLE}={name}", f"PYTHONPATH={recorder}"]
        with topspin as server:
            url = server.url
            for _ in range(WARM_UPS):
                stream(url)
            begun_ns = []
            for number in range(1, WINDOWS + 1):
                with window.open(number):
                    begun_ns.append(time.monotonic_ns())
                    stream(url)
                    time.sleep(_AFTERWARDS_S)
                taken_s = (time.monotonic_ns() - begun_ns[-1]) / 1e9
                with window.open(WINDOWS + number):  # as long, but nobody asks for anything
                    time.sleep(taken_s)
            records = window.records()
    return visits(records, begun_ns)


def visits(records: Sequence[dict[str, object]], begun_ns: Sequence[int]) -> list[Visit]:
    """Return what was called in every window that began at `begun_ns`, by process and file.

    Those windows have the numbers from 1; what is called in more than half of as many behind them
    does not count.
    """
    num_windows = len(begun_ns)
    delays: dict[tuple[str, str, str], dict[int, int]] = {}
    for record in records:
        command, calls = record["command"], record["calls"]
        assert isinstance(command, list)
        assert isinstance(calls, list)
        process = command[command.index("-m") + 1] if "-m" in command else command[-1]
        for number, file, function, first_ns in calls:
            path = Path(file)
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT:
                begin_ns = begun_ns[(number - 1) % num_windows]
                key = process, str(path.relative_to(ROOT)), function
                if key[1] in LONG_WAITS:
                    continue
                delays.setdefault(key, {})[number] = first_ns - begin_ns
    found: dict[tuple[str, str], dict[str, float]] = {}
    for (process, file, function), by_number in delays.items():
        asked = [delay for number, delay in by_number.items() if number <= num_windows]
        if len(asked) == num_windows and len(by_number) - num_windows <= num_windows // 2:
            found.setdefault((process, file), {})[function] = statistics.median(asked)
    return [
        Visit(process, file, tuple(sorted(delay_of, key=lambda name: delay_of[name])))
        for (process, file), delay_of in sorted(
            found.items(), key=lambda item: min(item[1].values())
        )
    ]


def page_lines(path: Sequence[Visit]) -> str:
    """Return the list as docs/architecture.md has it."""
    files = {visit.file for visit in path}
    lines = [f"{len(files)} files, in the order in which a token comes to them first:\n\n"]
    for number, visit in enumerate(path, start=1):
        named = [name for name in visit.functions if not name.endswith(">")]  # no comprehensions
        functions = ", ".join(f"`{name.replace('.<locals>', '')}`" for name in named)
        lines.append(f"{number}. `{visit.file}` ({visit.process}): {functions}\n")
    return "".join(lines)


def files_of_page() -> set[str]:
    """Return the files in the list of docs/architecture.md."""
    listed = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return {
        line.split("`")[1] for line in listed.splitlines() if line[:1].isdigit() and "`" in line
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Follow, print, and with --write rewrite the page."""
    parser = argparse.ArgumentParser(prog="make map", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-moe")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    shown = page_lines(follow(args.model))
    print(shown, end="")
    if args.write:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        if END not in rest:
            raise SystemExit(f"{PAGE}: no list between the two marks")
        PAGE.write_text(before + BEGIN + shown + END + rest.partition(END)[2], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
