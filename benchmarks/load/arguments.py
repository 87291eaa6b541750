"""The flags of every command that sends load, in the spelling of `vllm bench serve`.

Owns the flags of targets and reports and their mapping to a Target and ReportFlags; those of the
load and of the dataset are fields of LoadPattern and DatasetSettings. Sends no load, but asks the
tested server for its model. Every mistake is a ConfigError that names the flag.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.load.client.arrivals import check_load
from benchmarks.load.client.http import OWNED_FIELDS
from benchmarks.load.client.targets import first_model, served_model, wait_until_ready
from benchmarks.load.contracts import ENDPOINTS, LoadPattern, Target
from benchmarks.load.datasets.settings import DatasetSettings
from benchmarks.load.figures.metrics import LATENCIES, parse_goodput
from benchmarks.load.flags import add_flags, read_flags
from models.sources.hub import made_model_path
from models.text.tokenizer import Tokenizer
from models.text.tokenizer_names import has_tokenizer
from topspin.errors import ConfigError

# Datasets that set the output lengths.
EXACT_OUTPUT = ("random", "burstgpt")
_SAMPLING: dict[str, type] = {
    "top-p": float,
    "top-k": int,
    "min-p": float,
    "frequency-penalty": float,
    "presence-penalty": float,
    "repetition-penalty": float,
}


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the target: --url or --host and --port, and of requests."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        "--base-url",
        dest="base_url",
        metavar="URL",
        help="the server, if not --host and --port",
    )
    group.add_argument("--host", default=None, help="the server's host (127.0.0.1)")
    group.add_argument("--port", type=int, default=None, help="the server's port (8000)")
    add_request_arguments(group)


def add_request_arguments(group: argparse._ActionsContainer) -> None:
    """Add the flags of requests, for any server."""
    group.add_argument(
        "--backend",
        choices=tuple(ENDPOINTS),
        default="openai",
        help="openai: completions, openai-chat: chat completions (%(default)s)",
    )
    for name, metavar, text in (
        ("--endpoint", "PATH", "path (/v1/... of the backend)"),
        ("--model", "NAME", "served model (the server's first)"),
        ("--tokenizer", "DIR", "tokenizer's directory (the server's model's, if it is here)"),
        ("--api-key", "KEY", "bearer token (the variable OPENAI_API_KEY)"),
    ):
        group.add_argument(name, metavar=metavar, help=text)
    group.add_argument(
        "--header",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="header of every request",
    )
    group.add_argument(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help="fields of every request's body; they win over the flags below",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=f"ask for max_tokens tokens whatever comes (on for {', '.join(EXACT_OUTPUT)})",
    )
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    for name, kind in _SAMPLING.items():
        group.add_argument(f"--{name}", type=kind, metavar="X", help="sent if given")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        metavar="S",
        help="wait so long for the server to be ready (%(default)g: do not wait)",
    )


def add_load_arguments(parser: argparse.ArgumentParser, *, num_warmups: int) -> None:
    """Add the flags of the load and of the dataset."""
    group = parser.add_argument_group("load")
    add_flags(group, LoadPattern)
    group.add_argument(
        "--num-warmups",
        type=int,
        default=num_warmups,
        metavar="N",
        help="unmeasured requests (%(default)s)",
    )
    add_flags(parser.add_argument_group("dataset"), DatasetSettings)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the report and its files."""
    group = parser.add_argument_group("report")
    group.add_argument(
        "--percentile-metrics",
        default=",".join(LATENCIES),
        metavar="NAMES",
        help="latencies of the table (%(default)s)",
    )
    group.add_argument(
        "--metric-percentiles", default="99", metavar="P,P", help="percentiles (%(default)s)"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="goals of a good request: ttft:200 tpot:50 e2el:5000",
    )
    group.add_argument("--save-result", action="store_true", help="write the JSON")
    group.add_argument("--save-detailed", action="store_true", help="with lists of every request")
    group.add_argument("--result-dir", type=Path, metavar="DIR", help="folder (the current)")
    group.add_argument("--result-filename", metavar="FILE", help="name (label-rate-model-date)")
    group.add_argument("--label", help="prefix of the file's name (the backend)")
    group.add_argument(
        "--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="further keys of the JSON"
    )
    add_page_arguments(group)


def add_page_arguments(group: argparse._ActionsContainer) -> None:
    """Add --report and --quiet."""
    group.add_argument("--report", type=Path, metavar="FILE", help="tables and a picture, as .html")
    group.add_argument(
        "--disable-tqdm", "--quiet", action="store_true", dest="quiet", help="show no progress"
    )


def base_url_of(parsed: argparse.Namespace) -> str:
    """Return the server's address, without a slash at its end.

    Raises ConfigError if it is given twice or invalid.
    """
    if parsed.base_url is None:
        host, port = parsed.host or "127.0.0.1", 8000 if parsed.port is None else parsed.port
        if not 0 < port < 65536:
            raise ConfigError(f"--port {port} is no port")
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if parsed.host is not None or parsed.port is not None:
        raise ConfigError("--url says where the server is; leave out --host and --port")
    return checked_url(f"--url {parsed.base_url}", parsed.base_url)


def checked_url(flag: str, url: str) -> str:
    """Return an address without a slash at its end; raises ConfigError, naming `flag`, if bad."""
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{flag}: an address begins with http:// or https://")
    if url.endswith("/v1"):
        raise ConfigError(f"{flag}: leave out /v1, the endpoint has it")
    return url


def request_headers(parsed: argparse.Namespace) -> dict[str, str]:
    """Return the headers of every request, including the API key's."""
    key = parsed.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return headers | key_values("--header", parsed.header)


def target_of(
    parsed: argparse.Namespace, base_url: str, *, dataset_name: str, model: str | None = None
) -> Target:
    """Return the Target of the flags at `base_url`; asks it for its model if necessary.

    `model` takes the place of --model.

    Raises ConfigError for fields that cannot be set, ServerUnreachable if it must be asked
    and does not answer.
    """
    for name in parsed.extra_body:
        if name in OWNED_FIELDS:
            raise ConfigError(f"--extra-body may not set {name!r}: {OWNED_FIELDS[name]}")
    if parsed.endpoint is not None and not parsed.endpoint.startswith("/"):
        raise ConfigError(f"--endpoint {parsed.endpoint}: a path begins with /")
    headers = request_headers(parsed)
    return Target(
        base_url=base_url,
        model=model or parsed.model or first_model(base_url, headers),
        backend=parsed.backend,
        endpoint=parsed.endpoint,
        headers=headers,
        extra_body=_sampling_fields(parsed, dataset_name) | parsed.extra_body,
    )


def _sampling_fields(parsed: argparse.Namespace, dataset_name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": parsed.temperature}
    for flag in _SAMPLING:
        name = flag.replace("-", "_")
        if getattr(parsed, name) is not None:
            fields[name] = getattr(parsed, name)
    ignore_eos = parsed.ignore_eos
    if dataset_name in EXACT_OUTPUT if ignore_eos is None else ignore_eos:
        fields["ignore_eos"] = True
    return fields


def load_of(parsed: argparse.Namespace) -> LoadPattern:
    """Return the LoadPattern of the flags; raises ConfigError if they contradict each other."""
    if (parsed.num_warmups or 0) < 0:
        raise ConfigError(f"--num-warmups is {parsed.num_warmups}; it must be 0 or more")
    load = read_flags(LoadPattern, parsed)
    check_load(load)
    return load


class ReportFlags(NamedTuple):
    """The settings of a run's report."""

    latencies: tuple[str, ...]
    percentiles: tuple[float, ...]
    goodput_s: Mapping[str, float]
    metadata: Mapping[str, str]


def report_of(parsed: argparse.Namespace) -> ReportFlags:
    """Return the ReportFlags of the flags; raises ConfigError for an invalid name or number."""
    latencies = tuple(parsed.percentile_metrics.split(","))
    for name in latencies:
        if name not in LATENCIES:
            raise ConfigError(f"--percentile-metrics: {name!r} is none of {', '.join(LATENCIES)}")
    if not parsed.save_result:
        for flag in ("save_detailed", "result_dir", "result_filename", "metadata", "label"):
            if getattr(parsed, flag):
                raise ConfigError(f"--{flag.replace('_', '-')} needs --save-result")
    return ReportFlags(
        latencies=latencies,
        percentiles=_percentiles(parsed.metric_percentiles),
        goodput_s=parse_goodput(parsed.goodput),
        metadata=key_values("--metadata", parsed.metadata),
    )


def _percentiles(text: str) -> tuple[float, ...]:
    values = _floats("--metric-percentiles", text)
    for value in values:
        if not 0 <= value <= 100:
            raise ConfigError(f"--metric-percentiles {text}: {value:g} is not within 0 to 100")
    return values


def _floats(flag: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} {text}: not numbers with commas") from None


def key_values(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    """Return KEY=VALUE words as a dict; raises ConfigError, naming `flag`, for another word."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{flag} {pair}: expected KEY=VALUE")
        found[key.strip()] = value.strip()
    return found


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text}")
    return value


def numbers(flag: str, text: str, *, whole: bool) -> tuple[float, ...]:
    """Return the numbers of `text`, ascending; raises ConfigError naming `flag` otherwise."""
    found = _floats(flag, text)
    for value in found:
        if not 0 < value < math.inf or (whole and not value.is_integer()):
            kind = "whole number" if whole else "number"
            raise ConfigError(f"{flag} {text}: {value:g} is no {kind} above 0")
    if len(set(found)) < len(found):
        raise ConfigError(f"{flag} {text}: a value is given twice")
    return tuple(sorted(found))


class Opened(NamedTuple):
    """A target, the tokenizer's name, the tokenizer, and the dataset with its vocabulary."""

    target: Target
    tokenizer_id: str | None
    tokenizer: Tokenizer | None
    dataset: DatasetSettings


def open_target(parsed: argparse.Namespace, base_url: str, dataset: DatasetSettings) -> Opened:
    """Wait for the server if asked to, and return it with the named or its own tokenizer.

    Without a tokenizer the server is asked for its checkpoint's directory, which may be on
    this host, and for the size of its vocabulary, from which token ids can be drawn.
    """
    if parsed.ready_check_timeout_sec:
        wait_until_ready(base_url, parsed.ready_check_timeout_sec, request_headers(parsed))
    target = target_of(parsed, base_url, dataset_name=dataset.name)
    name, tokenizer = tokenizer_of(parsed.tokenizer, target.model)
    if tokenizer is not None:
        return Opened(target, name, tokenizer, dataset)
    served = served_model(target.base_url, target.model, target.headers)
    if served.root is not None:
        name, tokenizer = tokenizer_of(None, served.root)
    vocab_size = served.vocab_size if dataset.vocab_size is None else dataset.vocab_size
    return Opened(target, name, tokenizer, replace(dataset, vocab_size=vocab_size))


def tokenizer_of(tokenizer: str | None, model: str) -> tuple[str | None, Tokenizer | None]:
    """Return the name and the tokenizer: the one named, or the model's if it is on this machine.

    Nothing is downloaded. Raises ConfigError if the named one is not on this machine.
    """
    for name in filter(None, (tokenizer, model)):
        for directory in (Path(name).expanduser(), made_model_path(name)):
            if has_tokenizer(directory):
                return name, Tokenizer.from_directory(directory)
        if name == tokenizer:
            raise ConfigError(f"--tokenizer {name}: no directory with a tokenizer.json")
    return None, None
