"""The tables of benchmarks/README.md and of README.md's figures, written from the results.

Owns the markers (`<!-- table: NAME -->` to `<!-- end -->`) and replaces the text between them
by the tables of results/NAME.json, as its benchmark lays them out (for gpu-NAME the newest result
of a GPU; for peers a line of each comparison with peers and load), the picture of that name if
there is one, and the origin of the result; without a result, by "not measured". So the README's
figures are always those of the results. Run as

    python -m benchmarks.tables [--check]

after a result has changed; --check changes nothing and fails if something would.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.experiment import Experiment, Result, TextTable, number, table
from benchmarks.report import RESULTS
from topspin.errors import ConfigError

README = Path(__file__).with_name("README.md")
FIRST_README = README.parent.parent / "README.md"
NOT_MEASURED = "*not measured*"
_BEGIN = re.compile(r"<!-- table: (\S+) -->")
_END = "<!-- end -->"


def gpu_decode(result: Result) -> Iterator[TextTable]:
    """Yield decode and prefill on a GPU."""
    figures = measured(result)
    rows: list[Mapping[str, Any]] = [
        {"name": "decode, batch {batch}, context {context}".format_map(each), **each}
        for each in figures
        if each["of"] == "decode"
    ]
    rows += [
        {"name": f"prefill, {each['tokens']} tokens", "step_ms": each["ms"], **each}
        for each in figures
        if each["of"] == "prefill"
    ]
    yield TextTable(
        ["what", "ms", "tokens/s", "of the byte floor", "goal"],
        [
            [
                *(row["name"], number(row["step_ms"]), number(row["tokens_per_s"])),
                *(f"{row[key]:.0%}" if row.get(key) else "-" for key in ("fraction", "goal")),
            ]
            for row in rows
        ],
    )


def gpu_rooflines(result: Result) -> Iterator[TextTable]:
    """Yield a GPU's kernels with its limits."""
    columns = {
        "kernel": "{op}",
        "size": "{shape}",
        "us": "{us}",
        "of the limit": "{fraction:.0%}",
        "bound": "{bound}",
        "torch, us": "{library_us}",
    }
    yield table(columns, (each for each in measured(result) if each["of"] == "kernel"))


def measured(result: Result) -> Sequence[Mapping[str, Any]]:
    """Return the figures of a GPU's result; raise ConfigError if it has no speeds."""
    if result["quick"] or not result["complete"]:
        raise ConfigError(f"{result['benchmark']}: not a complete run at real sizes")
    figures: Sequence[Mapping[str, Any]] = result["figures"]
    return figures


GPU: Final = {
    "gpu-decode": Experiment("gpu-decode", None, gpu_decode),
    "gpu-rooflines": Experiment("gpu-rooflines", None, gpu_rooflines),
}
MODULES: Final = {
    "cost-model": "engine.cost_model",
    "cpu_kernels": "kernels.cpu_kernels",
    "disaggregation": "engine.disaggregation",
    "disaggregation-686m": "engine.disaggregation",
    "gateway": "gateway.command",
    "gateway_hostile": "gateway_hostile",
    "local_layers": "engine.local_layers",
    "long_prompt": "engine.long_prompt",
    "long_prompt-vllm": "engine.long_prompt",
    "m2n": "transport.m2n",
    "paired-gateway": "paired",
    "paired-m2n": "paired",
    "paired-scheduler": "paired",
    "paired-serve-qwen3-moe-686m": "load.compare",
    "paired-serve-smollm2-moe": "load.compare",
    "paired-startup": "paired",
    "paired-step-1": "paired",
    "paired-step-16": "paired",
    "payload": "quality.payload",
    "peers-deepseek-v2-lite-4": "load.compare",
    "peers-gpt-oss-3": "load.compare",
    "peers-qwen3-moe-686m": "load.compare",
    "peers-qwen3-moe-686m-2k": "load.compare",
    "peers-qwen3-moe-686m-32k": "load.compare",
    "peers-qwen3-moe-686m-64": "load.compare",
    "peers-qwen3-moe-686m-8k": "load.compare",
    "peers-qwen3-moe-686m-int4": "load.compare",
    "peers-qwen3-moe-686m-int4-64": "load.compare",
    "peers-smollm2-moe": "load.compare",
    "pingpong": "transport.pingpong",
    "placement": "engine.placement",
    "plan_search": "engine.plan_search",
    "published": "engine.published",
    "quantization": "quality.quantization",
    "qwen3-moe-686m-without-bf16": "load.compare",
    "retrieval": "retrieval.command",
    "scheduler_overhead": "scheduler_overhead",
    "sensitivity": "quality.sensitivity",
    "served": "engine.served",
    "smollm2-moe-without-bf16": "load.compare",
    "spec": "speculation.command",
    "spec-qwen3-moe-686m": "speculation.command",
    "startup": "engine.startup",
    "structured_output": "structured_output",
    "sweep-overload": "load.sweep",
    "tenants": "tenants",
    "vs_transformers": "vs_transformers",
}
"""The name of a result and of its table, and the module whose EXPERIMENT lays it out."""


def experiment_of(name: str) -> Experiment:
    """Return the benchmark of the table NAME."""
    if name in GPU:
        return GPU[name]
    if name not in MODULES:
        known = ", ".join(sorted({*GPU, *MODULES}))
        raise ConfigError(f"no layout for table {name}; there are: {known}")
    found: Experiment = importlib.import_module(f"benchmarks.{MODULES[name]}").EXPERIMENT
    return found


def render(text: str, results: Path) -> str:
    """Return `text` with the content between each pair of markers generated from `results`.

    Raises ConfigError for a name without a layout, a table without an end or in another
    table, and a result that cannot be laid out.
    """
    pieces, place = [], 0
    for begin in _BEGIN.finditer(text):
        name = begin[1]
        if begin.start() < place:
            raise ConfigError(f"table {name} begins inside another table")
        end = text.find(_END, begin.end())
        if end < 0:
            raise ConfigError(f"table {name} has no {_END}")
        pieces += [text[place : begin.end()], f"\n\n{block(name, results)}\n\n"]
        place = end
    return "".join([*pieces, text[place:]])


PEERS: Final = "peers"
_SERVERS: Final = ("topspin", "topspin-one-process", "llama.cpp", "ik_llama.cpp", "vllm")
_LONG_PROMPT: Final = 1024
_OF_SHORT, _OF_LONG = "tokens/s (TPOT, ms)", "prompt tokens/s (TTFT, ms)"
_FIGURES: Final = {
    _OF_SHORT: ("output_throughput", "median_tpot_ms"),
    _OF_LONG: ("prefill_throughput", "median_ttft_ms"),
}


def peers_summary(results: Path) -> str:
    """Return each server's figures of one day, a line per comparison and load.

    It is the day with the most comparisons, the newest of several. Output tokens/s and median TPOT;
    of long prompts the prompt's tokens/s and median TTFT. Two tables per origin.
    """
    paths = {each: result_path(each, results) for each in MODULES if each.startswith(f"{PEERS}-")}
    found = {name: json.loads(path.read_text()) for name, path in paths.items() if path}
    if not found:
        return NOT_MEASURED
    days = Counter(result["date"][:10] for result in found.values())
    fullest = max(days, key=lambda day: (days[day], day))
    tables: dict[str, dict[str, list[list[str]]]] = {}
    for name, result in found.items():
        if result["date"][:10] != fullest:
            continue
        is_long = result["dataset"]["random_input_len"] > _LONG_PROMPT
        title = _OF_LONG if is_long else _OF_SHORT
        rows = tables.setdefault(origin(result), {}).setdefault(title, [])
        for at, servers in result["concurrencies"].items():
            users = f"{at} {'user' if at == '1' else 'users'}"
            rows.append(
                [
                    f"{name.removeprefix(f'{PEERS}-')}, {users}",
                    *(_pair(servers.get(server, {}), *_FIGURES[title]) for server in _SERVERS),
                    str(result["rounds_measured"]),
                ]
            )
    blocks = []
    for source, of_source in sorted(tables.items(), reverse=True):
        for title, rows in sorted(of_source.items(), reverse=True):
            blocks.append(TextTable([title, *_SERVERS, "rounds"], rows).markdown())
        blocks.append(f"*{source}*")
    return "\n\n".join(blocks)


def _pair(figures: Mapping[str, Any], rate: str, time: str) -> str:
    if rate not in figures:
        return ""
    found = number(figures[rate]["median"])
    return found if figures.get(time) is None else f"{found} ({number(figures[time]['median'])})"


def block(name: str, results: Path) -> str:
    """Return the table NAME as markdown, with its picture and its origin."""
    if name == PEERS:
        return peers_summary(results)
    experiment = experiment_of(name)
    path = result_path(name, results)
    if path is None:
        return NOT_MEASURED
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("error") is not None:
            raise ConfigError(f"{path.name} is of a run that failed: {result['error']}")
        parts = [experiment.markdown(result)]
        parts.append(f"*{origin(result)}: [{path.name}](results/{path.name})*")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path.name} is not JSON: {error}") from None
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{path.name} is not a result of this benchmark: {type(error).__name__}: {error}"
        ) from error
    picture = path.with_suffix(".png")
    if picture.exists():
        parts.insert(1, f"![{name}](results/{picture.name})")
    return "\n\n".join(parts)


def result_path(name: str, results: Path) -> Path | None:
    """Return the file of a result; of several GPUs', NAME-DEVICE.json, the newest."""
    if not name.startswith("gpu-"):
        path = results / f"{name}.json"
        return path if path.exists() else None
    files = {path: json.loads(path.read_text()) for path in sorted(results.glob(f"{name}-*.json"))}
    return max(files, key=lambda path: str(files[path]["date"]), default=None)


def origin(result: Mapping[str, Any]) -> str:
    """Return a result's date, commit, machine and torch."""
    machine, versions = result["machine"], result["versions"]
    device = f"{result['device']}, " if "device" in result else ""
    return (
        f"{result['date'][:10]}, commit {result['commit']}, {device}{machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"torch {versions.get('torch', 'unknown')}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the tables of both README.md; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if it would")
    args = parser.parse_args(argv)
    pages = (README, FIRST_README)
    before = [page.read_text(encoding="utf-8") for page in pages]
    try:
        after = [render(text, RESULTS) for text in before]
    except ConfigError as error:
        print(f"tables: error: {error}", file=sys.stderr)
        return 2
    if args.check:
        if before != after:
            print("README.md differs from the results: run python -m benchmarks.tables")
        return int(before != after)
    for page, text in zip(pages, after, strict=True):
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
