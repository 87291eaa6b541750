"""Streams while a long prompt enters: their time per token meanwhile, and the prompt's own wait.

Streams of random tokens decode; then one prompt of thousands is sent. Starts `topspin serve`, or
takes a server that runs (--base-url). Run as

    python -m benchmarks.engine.long_prompt [MODEL] [--base-url URL] [--prompt-len N]
"""

from __future__ import annotations

import random
import statistics
import sys
from contextlib import ExitStack
from itertools import pairwise

from benchmarks.experiment import Experiment, Result, rows_of, say
from benchmarks.load.client.runner import check_complete, run_load
from benchmarks.load.client.targets import first_model
from benchmarks.load.contracts import BenchRequest, LoadPattern, MeasuredRequest, Target
from benchmarks.servers.topspin import GREEDY, TopspinServer, add_server_arguments
from topspin.errors import TopspinError

STREAMS = (0, 1, 4)
STREAM_PROMPT, STREAM_OUTPUT = 32, 3000
SENT_AT_S = 5.0
"""When the long prompt follows the streams."""
COLUMNS = {
    "streams": "{streams:.0f}",
    "TTFT of the prompt s": "{ttft_s:.2f}",
    "TPOT before ms": "{before_ms:.1f}",
    "meanwhile": "{meanwhile_ms:.1f}",
    "longest gap": "{longest_ms:.0f}",
}
EXPERIMENT = Experiment(
    "long_prompt", __doc__, rows_of(COLUMNS), command="python -m benchmarks.engine.long_prompt"
)


def gaps(records: list[MeasuredRequest], begin_s: float, end_s: float) -> list[float]:
    """Return the gaps between tokens of streams that overlap with a time, in seconds."""
    return [
        after - before
        for record in records
        for before, after in pairwise(record.arrival_times_s)
        if after > begin_s and before < end_s
    ]


def beside(target: Target, num_streams: int, prompt_len: int, vocab_size: int) -> Result:
    """Return the figures of one long prompt beside so many streams."""
    rng = random.Random(num_streams)

    def ask(length: int, max_tokens: int, arrival_s: float) -> BenchRequest:
        prompt = [rng.randrange(vocab_size) for _ in range(length)]
        return BenchRequest(prompt=prompt, max_tokens=max_tokens, arrival_s=arrival_s)

    streams = [ask(STREAM_PROMPT, STREAM_OUTPUT, 0.0) for _ in range(num_streams)]
    long = ask(prompt_len, 2, SENT_AT_S if streams else 0.0)
    run = run_load(target, [*streams, long], LoadPattern(replay=True))
    check_complete(run, target.base_url)
    *others, entered = sorted(run.records, key=lambda record: record.index)
    assert entered.first_token_s is not None
    row: Result = {"streams": num_streams, "ttft_s": entered.first_token_s - entered.intended_s}
    if not others:
        return {**row, "before_ms": None, "meanwhile_ms": None, "longest_ms": None}
    first_s = min(record.arrival_times_s[-1] for record in others)
    if first_s < entered.first_token_s:
        raise TopspinError(f"a stream ended after {first_s:.0f} s: give it more tokens")
    before = gaps(others, SENT_AT_S / 2, entered.intended_s)
    meanwhile = gaps(others, entered.intended_s, entered.first_token_s)
    return {
        **row,
        "before_ms": 1e3 * statistics.mean(before),
        "meanwhile_ms": 1e3 * statistics.mean(meanwhile),
        "longest_ms": 1e3 * max(meanwhile),
    }


def main() -> int:
    """Run the command; returns the exit status."""
    parser = EXPERIMENT.parser()
    add_server_arguments(parser)
    parser.add_argument("--base-url", metavar="URL", help="of a server that runs")
    parser.add_argument("--prompt-len", type=int, default=4000, metavar="N", help="(%(default)s)")
    parser.add_argument("--vocab-size", type=int, default=40_000, metavar="N", help="(%(default)s)")
    args, flags = parser.parse_known_args()
    with ExitStack() as stack:
        url = (
            args.base_url
            or stack.enter_context(
                TopspinServer([args.model, *flags], ready_timeout_s=args.start_timeout)
            ).url
        )
        target = Target(url, first_model(url), extra_body=GREEDY)
        beside(target, 0, 64, args.vocab_size)  # the first steps compile
        rows = []
        for num_streams in STREAMS:
            say(f"beside {num_streams} streams")
            rows.append(beside(target, num_streams, args.prompt_len, args.vocab_size))
    about = {"model": args.model, "flags": flags, "prompt_len": args.prompt_len}
    return EXPERIMENT.finish(args, {**about, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
