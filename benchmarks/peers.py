"""Topspin against vLLM, llama.cpp and ik_llama.cpp on the same machine, model and prompts.

Owns the start commands of the peers for a fair comparison (all cores, the same precision, 16
places), and leaves the rest to `topspin bench compare`: every server is started for its turn and
stopped after it, and turns alternate. The byte floor is that of the first Topspin. How to install
the peers is in benchmarks/README.md. Run as

    python -m benchmarks.peers MODEL_DIR --llama-server FILE --ik-llama-server FILE --gguf FILE

All other flags go to `topspin bench compare`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.load import compare
from benchmarks.load.started_server import free_port
from topspin.plan.setting import AUTO

PLACES = 16
TOKENS_PER_PLACE = 512
NAME = "model"


class _Ports(dict[str, int]):
    """A free port for each requested name."""

    def __missing__(self, name: str) -> int:
        self[name] = free_port()
        return self[name]


def start_lines(args: argparse.Namespace, ports: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the command of each requested target, Topspin's first."""
    cores = str(len(os.sched_getaffinity(0)))
    model = str(args.model)
    lines = {}
    for asked in args.topspin or ["topspin="]:
        name, _, flags = asked.partition("=")
        lines[name] = [
            *(sys.executable, "-m", "topspin", "serve", model, "--port", str(ports[name])),
            *("--served-model-name", NAME, *shlex.split(flags)),
        ]
    # ik_llama.cpp reads the same files; -rtr packs their weights for its kernels as it loads them.
    for name, server, more in (
        ("llama.cpp", args.llama_server, ()),
        ("ik_llama.cpp", args.ik_llama_server, ("-rtr",)),
    ):
        if server is not None:
            lines[name] = [
                *(str(server), "-m", str(args.gguf), "--alias", NAME),
                *("-t", cores, "-np", str(PLACES), "-c", str(PLACES * TOKENS_PER_PLACE)),
                *("--host", "127.0.0.1", "--port", str(ports[name]), *more),
            ]
    if args.vllm:
        lines["vllm"] = [
            *("env", "VLLM_CPU_KVCACHE_SPACE=2", "HF_HUB_OFFLINE=1"),
            *(str(args.vllm), "serve", model, "--served-model-name", NAME),
            *("--max-num-seqs", str(PLACES), "--host", "127.0.0.1"),
            *("--port", str(ports["vllm"])),
        ]
    return lines


def quantization_of(args: argparse.Namespace) -> str:
    """Return the format that the first Topspin's flags ask for."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quantization", default=AUTO)
    words = shlex.split(args.topspin[0].partition("=")[2]) if args.topspin else []
    quantization: str = parser.parse_known_args(words)[0].quantization
    return quantization


def main(argv: Sequence[str] | None = None) -> int:
    """Start and compare; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("model", type=Path, help="checkpoint directory, with a tokenizer")
    parser.add_argument("--vllm", type=Path, metavar="FILE", help="the vllm command")
    parser.add_argument("--llama-server", type=Path, metavar="FILE")
    parser.add_argument("--ik-llama-server", type=Path, metavar="FILE")
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help="the model for llama.cpp and ik_llama.cpp"
    )
    parser.add_argument(
        "--topspin",
        action="append",
        metavar="NAME=FLAGS",
        help="topspin serve with these flags; may be repeated (topspin=)",
    )
    args, rest = parser.parse_known_args(argv)
    reads_gguf = args.llama_server is not None or args.ik_llama_server is not None
    if reads_gguf != (args.gguf is not None):
        parser.error("--gguf goes together with --llama-server or --ik-llama-server")
    if not args.vllm and not reads_gguf:
        parser.error("name a peer: --vllm, or --llama-server or --ik-llama-server with --gguf")
    ports = _Ports()
    flags = []
    for name, words in start_lines(args, ports).items():
        url = f"http://127.0.0.1:{ports[name]}"
        flags += ["--target", f"{name}={url}={NAME}", "--start", f"{name}={shlex.join(words)}"]
    flags += ["--tokenizer", str(args.model), "--random-input-len", "128"]
    flags += ["--random-output-len", "64", "--start-timeout", "300"]
    flags += ["--floor-model", str(args.model), "--floor-quantization", quantization_of(args)]
    return compare.main([*flags, *rest])


if __name__ == "__main__":
    raise SystemExit(main())
