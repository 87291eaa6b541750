"""Load-test a server of the OpenAI API: `topspin bench serve`, used like vLLM's.

Owns the command: flags, the order (check all of them, find the server, warm it up, measure,
report) and the exit status: 0 if every request succeeded, 1 if none did, 130 after Ctrl-C.
Everything else is in the rooms beside it. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiment import show
from benchmarks.load import arguments, datasets
from benchmarks.load.client.runner import prepare, run_load
from benchmarks.load.contracts import BenchRequest, LoadPattern, LoadRun, Target
from benchmarks.load.figures.metrics import lists_of, measure_run
from benchmarks.load.figures.page import check_report, write_report
from benchmarks.load.figures.view import progress, tables_of
from topspin.errors import TopspinError


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
    check_report(parsed.report)
    settings = datasets.DatasetSettings.of(parsed, chat=parsed.backend == "openai-chat")
    target, tokenizer_id, tokenizer, settings = arguments.open_target(parsed, base_url, settings)
    requests = datasets.load(settings, tokenizer, np.random.default_rng(load.seed))
    run = measure(target, requests, load, parsed=parsed, settings=settings)
    result = measure_run(run, percentiles=report.percentiles, goodput_s=report.goodput_s)
    show([f"{target.model} at {target.url}", *tables_of({"": (run, result)}, report.latencies)])
    if parsed.save_result:
        about = {"tokenizer_id": tokenizer_id, "label": parsed.label, **report.metadata}
        path = (parsed.result_dir or Path()) / (
            parsed.result_filename or result_filename(run, result, parsed.label)
        )
        _write(path, {**result, **about}, run if parsed.save_detailed else None)
    if parsed.report is not None and run.records:
        write_report(parsed.report, {target.model: run}, title=f"Load test of {target.url}")
        print(f"Written to {parsed.report}")
    if run.health.saturated:
        print("note: the client was saturated; see the table", file=sys.stderr)
    if run.interrupted:
        return 130
    return 0 if result["completed"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="topspin bench serve",
        description="Sends load to any server of the OpenAI API and measures its latencies.",
        allow_abbrev=False,
    )
    arguments.add_target_arguments(parser)
    arguments.add_load_arguments(parser, num_warmups=0)
    arguments.add_report_arguments(parser)
    return parser


def result_filename(run: LoadRun, result: Mapping[str, Any], label: str | None) -> str:
    """Return the name that `vllm bench serve` would give: label, load, model and date."""
    load = run.load
    rate = f"{load.request_rate}qps"
    if load.ramp_up is not None:
        rate = f"ramp-up-{load.ramp_up}-{load.ramp_up_start_rps}qps-{load.ramp_up_end_rps}qps"
    limit = "" if load.max_concurrency is None else f"-concurrency{load.max_concurrency}"
    model = run.target.model.rstrip("/").rsplit("/", 1)[-1]
    return f"{label or run.target.backend}-{rate}{limit}-{model}-{result['date']}.json"


def _write(path: Path, result: dict[str, Any], detailed: LoadRun | None) -> None:
    """Write the JSON, with lists of every request of `detailed`."""
    if detailed is not None:
        result |= lists_of(detailed)
        requests = [asdict(record) for record in detailed.records]
        for fields in requests:
            # They are in vLLM's lists.
            del fields["text"], fields["error"]
        result["topspin"]["requests"] = requests
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    print(f"Written to {path}")


def measure(
    target: Target,
    requests: Sequence[BenchRequest],
    load: LoadPattern,
    *,
    parsed: argparse.Namespace,
    settings: datasets.DatasetSettings,
) -> LoadRun:
    """Check the run, warm the server up as --num-warmups says, and measure."""
    prepare(target, requests, load)
    warm_up(target, requests, load, parsed.num_warmups)
    about = {"dataset": settings.name, "dataset_path": str(settings.path or "")}
    with progress(quiet=parsed.quiet) as watch:
        return run_load(target, requests, load, settings=about, watch=watch)


def warm_up(
    target: Target, requests: Sequence[BenchRequest], load: LoadPattern, num_requests: int
) -> None:
    """Send `num_requests` requests like the first ones, as many at once as in the run.

    Raises WarmUpFailed if none succeeds.
    """
    if num_requests < 1:
        return
    chosen = [_other(requests[index % len(requests)]) for index in range(num_requests)]
    at_once = load.max_concurrency or num_requests
    limits = LoadPattern(max_concurrency=at_once, request_timeout_s=load.request_timeout_s)
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
    if request.prompt is not None:
        return replace(request, prompt=_reversed(request.prompt))
    messages = [each | {"content": _reversed(each["content"])} for each in request.messages or ()]
    return replace(request, messages=messages)


def _reversed(content: Any) -> Any:
    """Return token ids, or a text's words, the last one first."""
    return " ".join(content.split(" ")[::-1]) if isinstance(content, str) else content[::-1]
