"""Topspin against vLLM, llama.cpp and ik_llama.cpp on the same machine, models and prompts.

Owns the rows of the comparison, the files that they need (checkpoints with random weights, and
GGUF files made of them by llama.cpp's own tools), and the start commands of the peers for a fair
one: all cores, the same precision, as many places. Leaves the rest to `topspin bench compare`:
every server is started for its turn and stopped after it, and turns alternate. How to install the
peers is in benchmarks/README.md. Run as `make bench-peers`, or

    python -m benchmarks.peers [--row ROW ...] --llama-cpp DIR --ik-llama-cpp DIR --vllm FILE

All other flags go to `topspin bench compare`. Files that are there already are not made again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from benchmarks import model_maker, tables
from benchmarks.experiment import say
from benchmarks.load import compare
from benchmarks.load.started_server import free_port
from benchmarks.report import RESULTS
from models.sources.hub import DEFAULT_MODEL, resolve_model
from topspin.errors import TopspinError

NAME = "model"

Peer = Literal["llama.cpp", "ik_llama.cpp", "vllm"]


class Row(NamedTuple):
    """One comparison: a model in one format."""

    shape: str | None
    """Of benchmarks.model_maker; None: the default model."""
    peers: tuple[Peer, ...]
    """Those that serve it: ik_llama.cpp answers with other text for the default model, and vLLM
    reads no GGUF file of these families on a CPU."""
    file_type: Literal["bf16", "q4_0"] = "bf16"
    """Of the GGUF file; of q4_0 Topspin serves the file itself, otherwise the checkpoint."""
    flags: str = ""
    """Of every `topspin serve`."""
    prompt_len: int = 128
    output_len: int = 64
    at_once: tuple[int, ...] = (1, 16)
    """Requests; the peers have a place for each of the most."""
    num_prompts: int | None = None
    """Of each run (None: as `topspin bench compare` has it, for short prompts)."""
    retrieval: bool = False
    """Whether a third server of ours attends to retrieved keys only."""

    @property
    def tokens_per_place(self) -> int:
        """Return for how many tokens of each request a peer keeps room: 256 or more to spare."""
        return (-(-(self.prompt_len + self.output_len) // 256) + 1) * 256


ALL_PEERS: Final[tuple[Peer, ...]] = ("llama.cpp", "ik_llama.cpp", "vllm")
ROWS: Final = {
    "smollm2-moe": Row(None, ("llama.cpp", "vllm")),
    "qwen3-moe-686m": Row("qwen3-moe", ALL_PEERS),
    "qwen3-moe-686m-int4": Row("qwen3-moe", ("llama.cpp", "ik_llama.cpp"), "q4_0"),
    # Without ik_llama.cpp, which leaves one of 128 requests without an answer, its slots idle.
    "qwen3-moe-686m-64": Row("qwen3-moe", ("llama.cpp", "vllm"), at_once=(64,)),
    "qwen3-moe-686m-int4-64": Row("qwen3-moe", ("llama.cpp",), "q4_0", at_once=(64,)),
    "gpt-oss-3": Row("gpt-oss", ("llama.cpp",), flags="--max-model-len 512"),
    "deepseek-v2-lite-4": Row("deepseek-v2-lite", ("llama.cpp",), flags="--max-model-len 512"),
    "qwen3-moe-686m-2k": Row(
        "qwen3-moe", ALL_PEERS, prompt_len=2048, output_len=32, at_once=(1, 8), num_prompts=8
    ),
    "qwen3-moe-686m-8k": Row(
        "qwen3-moe", ALL_PEERS, prompt_len=8192, at_once=(1,), num_prompts=2, retrieval=True
    ),
    "qwen3-moe-686m-32k": Row(
        "qwen3-moe",
        ALL_PEERS,
        flags="--kv-cache-memory 3GiB",
        prompt_len=32000,
        at_once=(1,),
        num_prompts=1,
        retrieval=True,
    ),
}
TOPSPIN: Final = {"topspin": "", "topspin-one-process": "--transport local"}
RETRIEVAL: Final = {"topspin-retrieval": "--kv-retrieval-tokens 1024"}


class Files:
    """The checkpoints and GGUF files of the rows, made in one folder when they are asked for."""

    def __init__(self, folder: Path, llama_cpp: Path | None) -> None:
        """`llama_cpp` None: there are no tools for GGUF files."""
        self._folder = folder
        self._llama_cpp = llama_cpp

    def checkpoint(self, row: Row) -> Path:
        """Return the checkpoint of a row."""
        if row.shape is None:
            return resolve_model(DEFAULT_MODEL)
        directory = self._folder / row.shape
        if not (directory / "config.json").exists():
            model_maker.main([str(directory), "--shape", row.shape])
        return directory

    def gguf(self, row: Row) -> Path:
        """Return the GGUF file of a row."""
        assert self._llama_cpp is not None
        plain = self._folder / f"{row.shape or DEFAULT_MODEL}-bf16.gguf"
        plain.parent.mkdir(parents=True, exist_ok=True)
        if not plain.exists():
            script = self._llama_cpp / "convert_hf_to_gguf.py"
            asked = [str(self.checkpoint(row)), "--outtype", "bf16", "--outfile"]
            environ = {**os.environ, "PYTHONPATH": str(self._llama_cpp / "gguf-py")}
            _make(plain, [sys.executable, str(script), *asked], environ)
        if row.file_type == "bf16":
            return plain
        file = plain.with_name(f"{row.shape or DEFAULT_MODEL}-{row.file_type}.gguf")
        if not file.exists():
            program = self._llama_cpp / "build" / "bin" / "llama-quantize"
            _make(file, [str(program), str(plain)], after=[row.file_type.upper()])
        return file


def _make(
    file: Path,
    command: Sequence[str],
    environ: dict[str, str] | None = None,
    *,
    after: Sequence[str] = (),
) -> None:
    """Let a command write `file`, which is there whole or not at all."""
    begun = file.with_suffix(".begun.gguf")
    say(f"making {file}")
    subprocess.run([*command, str(begun), *after], env=environ, check=True)
    begun.rename(file)


def start_lines(row: Row, args: argparse.Namespace, files: Files) -> dict[str, list[str]]:
    """Return the command of each target of a row, Topspin's first, without its port."""
    cores, places = str(len(os.sched_getaffinity(0))), row.at_once[-1]
    reads_gguf = row.file_type != "bf16"
    model = str(files.gguf(row) if reads_gguf else files.checkpoint(row))
    lines = {}
    for name, flags in (TOPSPIN | RETRIEVAL if row.retrieval else TOPSPIN).items():
        lines[name] = [
            *(sys.executable, "-m", "topspin", "serve", model, "--served-model-name", NAME),
            *("--max-ttft", "0"),  # no peer refuses who would wait long
            *("--speculative-config", "off"),  # and none guesses tokens
            *shlex.split(f"{row.flags} {flags}"),
        ]
    # ik_llama.cpp reads the same files; -rtr packs their weights for its kernels as it loads them.
    for name, folder, more in (
        ("llama.cpp", args.llama_cpp, ()),
        ("ik_llama.cpp", args.ik_llama_cpp, ("-rtr",)),
    ):
        if name in row.peers and folder is not None:
            lines[name] = [
                *(str(folder / "build" / "bin" / "llama-server"), "-m", str(files.gguf(row))),
                *("--alias", NAME, "-t", cores, "-np", str(places)),
                *("-c", str(places * row.tokens_per_place), "--host", "127.0.0.1", *more),
            ]
    if "vllm" in row.peers and args.vllm is not None:
        lines["vllm"] = [
            *("env", "VLLM_CPU_KVCACHE_SPACE=2", "HF_HUB_OFFLINE=1"),
            *(str(args.vllm), "serve", model, "--served-model-name", NAME),
            *("--max-num-seqs", str(places), "--host", "127.0.0.1"),
        ]
    return lines


def compare_row(name: str, args: argparse.Namespace, files: Files, rest: Sequence[str]) -> int:
    """Compare the servers of one row; returns the exit status of `topspin bench compare`."""
    row = ROWS[name]
    flags = ["--name", f"peers-{name}", "--result-dir", str(args.result_dir)]
    for target, words in start_lines(row, args, files).items():
        port = free_port()
        flags += ["--target", f"{target}=http://127.0.0.1:{port}={NAME}"]
        flags += ["--start", f"{target}={shlex.join([*words, '--port', str(port)])}"]
    checkpoint = str(files.checkpoint(row))
    flags += ["--tokenizer", checkpoint, "--floor-model", checkpoint]
    if row.file_type == "q4_0":
        flags += ["--floor-quantization", "int4"]
    flags += ["--random-input-len", str(row.prompt_len), "--random-output-len", str(row.output_len)]
    flags += ["--concurrencies", ",".join(map(str, row.at_once)), "--start-timeout", "300"]
    if row.num_prompts is not None:
        flags += ["--num-prompts", str(row.num_prompts), "--num-warmups", "1"]
    return compare.main([*flags, *rest])


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all rows asked for, and write the tables; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--row", action="append", choices=list(ROWS), dest="rows", help="may be repeated (all)"
    )
    parser.add_argument("--vllm", type=Path, metavar="FILE", help="the vllm command")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="its sources, built in build")
    parser.add_argument("--ik-llama-cpp", type=Path, metavar="DIR")
    parser.add_argument(
        "--models", type=Path, default=Path("models-of-peers"), metavar="DIR", help="(%(default)s)"
    )
    parser.add_argument("--result-dir", type=Path, default=RESULTS, metavar="DIR")
    args, rest = parser.parse_known_args(argv)
    if args.llama_cpp is None:
        parser.error("--llama-cpp is missing: its tools make the files that all servers read")
    files = Files(args.models, args.llama_cpp)
    num_failed = 0
    for name in args.rows or ROWS:
        say(f"comparing {name}")
        try:
            if status := compare_row(name, args, files, rest):
                return status  # of a signal
        except TopspinError as error:
            say(f"{name} failed: {error}")
            num_failed += 1
    if num_failed:
        return 1
    return tables.main([]) if args.result_dir == RESULTS else 0


if __name__ == "__main__":
    raise SystemExit(main())
