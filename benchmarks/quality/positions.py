"""The perplexity of a text by position, from a running server: where a context is too long.

Asks for the log-probabilities of a text's tokens, as one prompt, and shows the perplexity of each
range of positions. Run as `python -m benchmarks.quality.positions FILE... --url URL`, for example
with docs/*.md; a server with another rotation (`--hf-overrides`) is another run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

FIRST_RANGE = 2048


def scores_of(url: str, text: str, num_tokens: int) -> list[float]:
    """Return the log-probabilities of the text's tokens from its second to that of `num_tokens`.

    Raises httpx.HTTPStatusError if the server refuses.
    """
    with httpx.Client(base_url=url, timeout=None) as client:

        def post(path: str, body: dict[str, Any]) -> Any:
            return client.post(path, json=body).raise_for_status().json()

        token_ids = post("/tokenize", {"prompt": text})["tokens"][:num_tokens]
        body = {"prompt": token_ids, "max_tokens": 0, "prompt_logprobs": 0}
        [choice] = post("/v1/completions", body)["choices"]
    entries = zip(token_ids[1:], choice["prompt_logprobs"][1:], strict=True)
    return [entry[str(token_id)]["logprob"] for token_id, entry in entries]


def perplexities(scores: Sequence[float]) -> list[tuple[int, int, float]]:
    """Return the perplexity of each range of positions, each but the first as long as all before.

    The range at the end is as long as the text lets it be.
    """
    num_tokens = len(scores) + 1
    ends = [0, FIRST_RANGE]
    while ends[-1] < num_tokens:
        ends.append(2 * ends[-1])
    ends[-1] = min(ends[-1], num_tokens)
    found = []
    for begin, end in pairwise(ends):
        part = scores[max(begin - 1, 0) : end - 1]
        found.append((begin, end, math.exp(-sum(part) / len(part))))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the perplexity of each range; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="the text, in parts")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--num-tokens", type=int, default=32_000, help="of the text, from its begin"
    )
    parsed = parser.parse_args(arguments)
    text = "\n".join(file.read_text() for file in parsed.files)
    begin_s = time.monotonic()
    scores = scores_of(parsed.url, text, parsed.num_tokens)
    print(f"{len(scores) + 1} tokens in {time.monotonic() - begin_s:.0f} s")
    for begin, end, value in perplexities(scores):
        print(f"positions {begin:6} to {end:6}: perplexity {value:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
