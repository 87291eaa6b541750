"""Output throughput at 16 concurrent requests: Topspin against transformers' generate.

Both serve the same checkpoint in the same dtype on the same machine, in turn (A B A B):
Topspin as `topspin serve` runs it (one attention and one expert process over shm unless
flags say otherwise) with 16 concurrent streaming HTTP requests; transformers as one
process that generates a static batch of 16. Prompts are random token ids, output lengths
are fixed. Also measured: seconds until ready and resident memory (PSS) of all processes.

    python -m benchmarks.vs_transformers [MODEL] [--requests 16] [-- SERVE FLAGS]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks import report
from benchmarks.startup import descendants, pss_bytes

READY_TIMEOUT_S = 300.0

_TRANSFORMERS_WORKER = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.disable_progress_bar(); logging.set_verbosity_error()
path, dtype, output_len = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
print("ready", flush=True)
for line in sys.stdin:
    prompts = torch.tensor(json.loads(line))
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
                             min_new_tokens=output_len, max_new_tokens=output_len, pad_token_id=0)
    elapsed_s = time.perf_counter() - started
    print(json.dumps({"elapsed_s": elapsed_s, "tokens": out[:, prompts.shape[1]:].tolist()}),
          flush=True)
"""


class Run(NamedTuple):
    """One round of one side: output tokens per second, and the tokens themselves."""

    tokens_per_s: float
    tokens: list[list[int]]


class TopspinServer:
    """`topspin serve` as a child process on a free port."""

    def __init__(self, model: str, flags: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "topspin", "serve", model, "--port", str(port), *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._wait_until_ready()
        self.ready_s = time.perf_counter() - started
        self.model = httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SystemExit(f"topspin serve exited with {self._process.returncode}")
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise SystemExit("topspin serve did not get ready")

    def pss_bytes(self) -> int:
        """Return the proportional set size of the supervisor and all its descendants."""
        return sum(pss_bytes(pid) for pid in descendants(self._process.pid))

    def generate(self, prompts: list[list[int]], output_len: int) -> Run:
        """Send all prompts at once, each in a separate stream."""

        def stream(prompt: list[int]) -> list[int]:
            tokens: list[int] = []
            body = {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body, timeout=READY_TIMEOUT_S
            ) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line[6:])["choices"]:
                            tokens += choice.get("token_ids") or []
            return tokens

        with ThreadPoolExecutor(len(prompts)) as pool:
            started = time.perf_counter()
            tokens = list(pool.map(stream, prompts))
            elapsed_s = time.perf_counter() - started
        return Run(sum(map(len, tokens)) / elapsed_s, tokens)

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


class TransformersBatch:
    """A child process that generates static batches."""

    def __init__(self, model: str, dtype: str, output_len: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TRANSFORMERS_WORKER, model, dtype, str(output_len)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise SystemExit("the transformers process did not start")

    def generate(self, prompts: list[list[int]]) -> Run:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        tokens = answer["tokens"]
        return Run(sum(map(len, tokens)) / answer["elapsed_s"], tokens)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def main() -> None:
    """Run the comparison, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-moe")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--name", default="vs_transformers", help="name of the result file")
    parser.add_argument("serve_flags", nargs="*", help="flags of topspin serve, after --")
    args = parser.parse_args()
    from models.sources.hub import resolve_model

    path = str(resolve_model(args.model))
    vocab_size = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)

    def prompts() -> list[list[int]]:
        # New prompts every round: the prefix cache must not help.
        return [
            [rng.randrange(vocab_size) for _ in range(args.prompt_len)]
            for _ in range(args.requests)
        ]

    ours = TopspinServer(path, ["--dtype", args.dtype, *args.serve_flags])
    idle_pss_bytes = ours.pss_bytes()
    theirs = TransformersBatch(path, args.dtype, args.output_len)
    ours.generate(prompts(), args.output_len)
    theirs.generate(prompts())
    rows: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        batch = prompts()
        a, b = ours.generate(batch, args.output_len), theirs.generate(batch)
        same = sum(x == y for x, y in zip(a.tokens, b.tokens, strict=True))
        rows.append(
            {
                "topspin_tokens_per_s": round(a.tokens_per_s, 1),
                "transformers_tokens_per_s": round(b.tokens_per_s, 1),
                "ratio": round(a.tokens_per_s / b.tokens_per_s, 3),
                "identical_sequences": same,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    loaded_pss_bytes = ours.pss_bytes()
    weights_bytes = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    result = {
        "settings": {**vars(args), "model": args.model},
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "rounds": rows,
        "median_ratio": statistics.median(row["ratio"] for row in rows),
        "median_topspin_tokens_per_s": statistics.median(
            row["topspin_tokens_per_s"] for row in rows
        ),
        "median_transformers_tokens_per_s": statistics.median(
            row["transformers_tokens_per_s"] for row in rows
        ),
        "ready_s": round(ours.ready_s, 2),
        "weights_mb": round(weights_bytes / 1e6, 1),
        "pss_idle_mb": round(idle_pss_bytes / 1e6, 1),
        "pss_loaded_mb": round(loaded_pss_bytes / 1e6, 1),
    }
    ours.close()
    theirs.close()
    print(json.dumps({k: v for k, v in result.items() if k != "settings"}, indent=2))
    print(f"written: {report.write(args.name, result).name}")


if __name__ == "__main__":
    main()
