"""Load-test a server of the OpenAI API: `topspin bench serve`, used like vLLM's.

Owns the command: flags, the order (check all of them, find the server, warm it up, measure,
report) and the exit status: 0 if every request succeeded, 1 if none did, 130 after Ctrl-C.
Everything else is in benchmarks.load. Needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load import arguments, datasets, pictures
from benchmarks.load import report as pages
from benchmarks.load.contracts import BenchRequest, Load, Message, Run, Target
from benchmarks.load.metrics import Metrics, measure_run
from benchmarks.load.result import result_filename, result_json, write_result
from benchmarks.load.runner import prepare, run_load
from benchmarks.load.targets import wait_until_ready
from benchmarks.load.view import Progress, print_table
from topspin.errors import ConfigError, TopspinError


class WarmUpFailed(TopspinError):
    """No warm-up request succeeded, so nothing can be measured; the message has the error."""

    code = "warm_up_failed"


def main(flags: Sequence[str] | None = None) -> int:
    """Run the command with `flags` (default: the process's); returns the exit status."""
    parsed = _parser().parse_args(flags)
    # All flags are checked before any request to the server.
    base_url = arguments.base_url_of(parsed)
    load = arguments.load_of(parsed)
    report = arguments.report_of(parsed)
    if parsed.report is not None:
        pages.check_path(parsed.report)
        pictures.check_can_draw()
    if parsed.num_warmups < 0:
        raise ConfigError(f"--num-warmups is {parsed.num_warmups}; it must be 0 or more")
    chat = parsed.backend == "openai-chat"
    settings = datasets.DatasetSettings.of(parsed, chat=chat)
    if parsed.ready_check_timeout_sec:
        headers = arguments.request_headers(parsed)
        wait_until_ready(base_url, parsed.ready_check_timeout_sec, headers)
    target = arguments.target_of(parsed, base_url, dataset_name=settings.name)
    tokenizer_id, tokenizer, settings = arguments.texts_of(parsed, target, settings)
    requests = datasets.load(settings, tokenizer, np.random.default_rng(parsed.seed))
    prepare(target, requests, load)
    warm_up(target, requests, load, parsed.num_warmups)
    run = _measure(target, requests, load, parsed, settings)
    metrics = measure_run(run, percentiles=report.percentiles, goodput_s=report.goodput_s)
    print_table(run, metrics, report.latencies)
    if parsed.save_result:
        result = result_json(
            run,
            metrics,
            tokenizer_id=tokenizer_id,
            label=parsed.label,
            metadata=report.metadata,
            detailed=parsed.save_detailed,
        )
        name = parsed.result_filename or result_filename(run, parsed.label)
        path = (parsed.result_dir or Path()) / name
        write_result(path, result)
        print(f"Written to {path}")
    if parsed.report is not None and run.records:
        pages.write_report(parsed.report, {target.model: run}, title=f"Load test of {target.url}")
        print(f"Written to {parsed.report}")
    return _status(run, metrics)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="topspin bench serve",
        description="Sends load to any server of the OpenAI API and measures its latencies.",
        allow_abbrev=False,
    )
    arguments.add_target_arguments(parser)
    arguments.add_load_arguments(parser)
    parser.add_argument(
        "--num-prompts", type=int, default=None, metavar="N", help="requests (1000, or the file's)"
    )
    parser.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="unmeasured requests (%(default)s)"
    )
    datasets.add_arguments(parser)
    arguments.add_report_arguments(parser)
    return parser


def _measure(
    target: Target,
    requests: list[BenchRequest],
    load: Load,
    parsed: argparse.Namespace,
    settings: datasets.DatasetSettings,
) -> Run:
    about = {"dataset": settings.name, "dataset_path": str(settings.path or "")}
    with Progress(quiet=parsed.quiet) as progress:
        return run_load(target, requests, load, settings=about, watch=progress.show)


def _status(run: Run, metrics: Metrics) -> int:
    if run.health.saturated:
        print("note: the client was saturated; see the table", file=sys.stderr)
    if run.interrupted:
        return 130
    return 0 if metrics.completed else 1


def warm_up(
    target: Target, requests: Sequence[BenchRequest], load: Load, num_requests: int
) -> None:
    """Send `num_requests` requests like the first ones, as many at once as in the run.

    Raises WarmUpFailed if none succeeds.
    """
    if num_requests < 1:
        return
    chosen = [_other(requests[index % len(requests)]) for index in range(num_requests)]
    at_once = load.users or load.max_concurrency or num_requests
    limits = Load(max_concurrency=at_once, request_timeout_s=load.request_timeout_s)
    run = run_load(target, chosen, limits)
    if run.interrupted:
        raise KeyboardInterrupt
    if not any(record.ok for record in run.records):
        first = run.records[0]
        raise WarmUpFailed(f"no warm-up request succeeded: {first.error_kind}: {first.error}")


def _other(request: BenchRequest) -> BenchRequest:
    """Return a request of the same size that shares no prefix with `request`.

    A warm-up with the same prompt would leave it in the server's prefix cache, and make the first
    measured requests faster.
    """
    alone = replace(request, session=None, turn=0)
    if isinstance(request.prompt, list):
        return replace(alone, prompt=request.prompt[::-1])
    if request.prompt is not None:
        return replace(alone, prompt=_reversed_words(request.prompt))
    return replace(
        alone, messages=[_reversed_message(message) for message in request.messages or ()]
    )


def _reversed_message(message: Message) -> Message:
    content: Any = message.get("content")
    return message | {"content": _reversed_words(content)} if isinstance(content, str) else message


def _reversed_words(text: str) -> str:
    return " ".join(reversed(text.split(" ")))
