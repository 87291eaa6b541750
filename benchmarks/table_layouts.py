"""The layout of each benchmark's result as a markdown table.

A layout is a function of a result's JSON; apart from the result's figures it only computes
medians and spreads of its rounds. Knows no file. Called by benchmarks.tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.load.compare import NAMES, floor_row
from benchmarks.markdown import Result, number, percent, table
from benchmarks.retrieval_layout import retrieval
from topspin.errors import ConfigError

Layout = Callable[[Result], str]


def peers(result: Result) -> str:
    """Lay out `topspin bench compare`: a table for each concurrency."""
    parts = []
    # Results from before there was a floor have no such key.
    floor = result.get("byte_floor")
    for at, targets in result["concurrencies"].items():
        rows = [
            [title, *(_compared(figures.get(name)) for figures in targets.values())]
            for name, title in NAMES.items()
        ]
        if at == "1" and floor is not None:
            rows.append(floor_row(targets, floor["ms_per_token"]))
        parts.append(table([f"{at} at once", *targets], rows))
    rounds = result["rounds_measured"]
    parts.append(
        f"Medians of {rounds} rounds in turn; x: ratio to {next(iter(targets))}, in brackets its "
        "least and greatest round."
    )
    if floor is not None:
        parts.append(
            f"Byte floor: {floor['weight_bytes'] / 1e6:.0f} MB of weights a step, read at "
            f"{floor['read_bytes_per_s'] / 1e9:.1f} GB/s."
        )
    for name, agreed in result["agreement"].items():
        tokens = agreed["common_prefix_tokens"]
        measured = "" if tokens is None else f"; the first {tokens:.1f} tokens agree on average"
        parts.append(
            f"Greedy answers of {name} that are the same: {percent(agreed['identical'])} of "
            f"{agreed['num_prompts']}{measured}."
        )
    return "\n\n".join([*parts, *(f"Warning: {warning}" for warning in result["warnings"])])


def _compared(row: Result | None) -> str:
    if row is None:
        return "-"
    text, ratio = number(row["median"]), row.get("ratio")
    if ratio is None:
        return text
    return f"{text} ({ratio['median']:.2f}x [{ratio['least']:.2f}..{ratio['greatest']:.2f}])"


SPEC_HEADINGS = (
    "prompts",
    "server",
    "tokens/s",
    "median TPOT (ms)",
    "accepted a draft",
    "drafted",
    "answers as off",
)


def spec(result: Result) -> str:
    """Lay out `topspin bench spec`; raise ConfigError if it failed."""
    if result["error"] is not None:
        raise ConfigError(f"{result['benchmark']}: {result['error']}")
    parts = [
        f"{Path(result['model']).name}, `{result['servers']['adaptive']}`, at most "
        f"{result['output_len']} tokens an answer:"
    ]
    for at, kinds in result["concurrencies"].items():
        first, *others = SPEC_HEADINGS
        parts.append(table([f"{first}, {at} at once", *others], spec_rows(kinds)))
    parts.append(
        f"Medians of {result['rounds_measured']} rounds in turn; x: ratio to off, in brackets its "
        "95 % interval (Student's t on the logarithms of the rounds' ratios)."
    )
    return "\n\n".join([*parts, *(f"Warning: {warning}" for warning in result["warnings"])])


def spec_rows(kinds: Mapping[str, Mapping[str, Result]]) -> list[list[str]]:
    """Return a row for each kind and server; the table is that of spec_figures.summarise."""
    return [
        [
            *(kind, server),
            *(_with_interval(figures[name]) for name in ("output_throughput", "median_tpot_ms")),
            *(number(figures["accepted_per_draft"]), str(figures["draft_tokens"])),
            percent(figures["equal_answers"]) if "equal_answers" in figures else "-",
        ]
        for kind, servers in kinds.items()
        for server, figures in servers.items()
    ]


def _with_interval(row: Result | None) -> str:
    if row is None:
        return "-"
    text, ratio = number(row["median"]), row.get("ratio")
    if ratio is None:
        return text
    if ratio["low"] is None:
        return f"{text} ({ratio['mean']:.2f}x)"
    return f"{text} ({ratio['mean']:.2f}x [{ratio['low']:.2f}..{ratio['high']:.2f}])"


def quantization(result: Result) -> str:
    """Lay out the loss per model and mode, relative to the model in fp32."""
    return table(
        ["model", "weights", "mean KL", "greatest KL", "same token", "perplexity"],
        (
            [
                *(row["model"], row["mode"]),
                *(number(row.get(name)) for name in ("mean_kl", "max_kl")),
                "-" if row["mode"] == "fp32" else f"{row['same_most_likely_token']:.1%}",
                number(row["perplexity"]),
            ]
            for row in result["rows"]
        ),
    )


def payload(result: Result) -> str:
    """Lay out the loss per wire format."""
    return table(
        ["rows on the wire", "mean KL", "greatest KL", "same token", "equal continuations"],
        (
            [
                *(row["payload"], number(row["mean_kl"]), number(row["max_kl"])),
                f"{row['same_most_likely_token']:.1%}",
                f"{row['greedy']['identical_sequences']} of {row['greedy']['num_sequences']}",
            ]
            for row in result["rows"]
        ),
    )


def disaggregation(result: Result) -> str:
    """Lay out the decode rates of one process and of two."""
    rates, ratios = result["median_decode_tokens_per_s"], [r["ratio"] for r in result["rounds"]]
    return table(
        ["", "decode tokens/s"],
        [
            ["one process (local)", number(rates["local"])],
            ["attention and experts apart", number(rates["disaggregated"])],
            ["ratio", _ratio_of(ratios)],
        ],
    )


def placement(result: Result) -> str:
    """Lay out the decode rates of uniform and planned shares, by the number of streams."""
    rows = []
    for batch, found in result["batches"].items():
        rates, ratios = found["median_decode_tokens_per_s"], [r["ratio"] for r in found["rounds"]]
        rows.append([batch, number(rates["uniform"]), number(rates["planned"]), _ratio_of(ratios)])
    held = {name: " + ".join(map(str, each[1:])) for name, each in result["experts"].items()}
    heads = [f"{name} ({held[name]} experts), tokens/s" for name in ("uniform", "planned")]
    return table(["streams", *heads, "ratio"], rows)


def local_layers(result: Result) -> str:
    """Lay out what layers without a hop bring, measured and predicted."""
    return table(
        ["layers without a hop", "tokens/s", "predicted", "speed-up", "predicted", "error"],
        [
            [
                str(row["layers_without_hop"]),
                number(row["tokens_per_s"]),
                number(row["predicted_tokens_per_s"]),
                f"{row['speed_up']:.2f}x",
                f"{row['predicted_speed_up']:.2f}x",
                f"{row['error']:+.1%}",
            ]
            for row in result["rows"]
        ],
    )


def cost_model(result: Result) -> str:
    """Lay out the errors of the planner's cost model."""
    names = {
        "T_a": "attention half of a layer",
        "T_e": "experts of a layer",
        "head": "outside the layers",
        "step": "whole step",
        "memory": "memory of a node",
    }
    return table(
        ["", "held-out points", "median error", "p90", "worst"],
        [
            [
                name,
                str(result["errors"][kind]["points"]),
                *(f"{result['errors'][kind][f'{at}_percent']:.1f} %" for at in _QUANTILES),
            ]
            for kind, name in names.items()
            if kind in result["errors"]
        ],
    )


def sensitivity(result: Result) -> str:
    """Lay out the divergence of mixed and uniform formats, and how well it was predicted."""
    layouts = table(
        ["formats", "bits per number", "rounding", "KL, nats per token", "perplexity"],
        [
            [
                each["name"],
                f"{each['mean_bits']:.2f}",
                each["rounding"],
                f"{each['kl']:.4f}",
                f"{each['perplexity']:.2f}",
            ]
            for each in result["layouts"]
        ],
    )
    kinds = {
        "indicator_kl": "indicator and KL",
        "indicator_perplexity": "indicator and perplexity",
        "predicted_kl": "prediction and KL, of layers not measured",
    }
    ranks = table(
        ["Spearman's rank correlation", *(each["format"] for each in result["ranks"])],
        [
            [name, *(f"{each[kind]:.2f}" for each in result["ranks"])]
            for kind, name in kinds.items()
        ],
    )
    sums = table(
        ["formats", "KL", "sum of single parts", "of predictions"],
        [
            [each["name"], *(f"{each[kind]:.4f}" for kind in ("kl", "sum_kl", "predicted_kl"))]
            for each in result["sums"]
        ],
    )
    return f"{layouts}\n\n{ranks}\n\n{sums}"


_QUANTILES = ("median", "p90", "worst")


def _ratio_of(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f}x [{min(ratios):.2f}..{max(ratios):.2f}]"


def vs_transformers(result: Result) -> str:
    """Lay out throughput, start and memory."""
    return table(
        ["", "Topspin", "transformers"],
        [
            [
                "output tokens/s",
                number(result["median_topspin_tokens_per_s"]),
                number(result["median_transformers_tokens_per_s"]),
            ],
            ["ratio", _ratio_of([r["ratio"] for r in result["rounds"]]), ""],
            ["seconds until ready", number(result["ready_s"]), ""],
            ["memory (PSS, MB), loaded", number(result["pss_loaded_mb"]), ""],
        ],
    )


def m2n(result: Result) -> str:
    """Lay out round trips and throughput, a column per backend."""
    backends = list(dict.fromkeys(row["backend"] for row in result["rows"]))
    found = {(row["topology"], row["message_bytes"], row["backend"]): row for row in result["rows"]}
    sizes = list(dict.fromkeys((topology, size) for topology, size, _ in found))

    def lines(write: Callable[[Result], str]) -> Iterable[list[str]]:
        for topology, size in sizes:
            cells = (found.get((topology, size, backend)) for backend in backends)
            label = f"{topology}, {size // 1024} KB"
            yield [label, *("-" if row is None else write(row) for row in cells)]

    times = lines(lambda row: f"{number(row['p50_us'])} / {number(row['p99_us'])}")
    rates = lines(lambda row: number(row["gb_per_s"]))
    return "\n\n".join(
        [
            table(["round trip, p50 / p99 us", *backends], times),
            table(["four in the air, GB/s", *backends], rates),
        ]
    )


def pingpong(result: Result) -> str:
    """Lay out the overlap against the formula, and the choice of `auto`."""
    rows = [
        [
            f"{row['tc_over_tf']:g}",
            row["m"],
            *(number(row[name]) for name in ("measured_ms", "pipeline_ms")),
            percent(row["of_pipeline"]),
            f"{row['throughput_over_m1']:.2f}x",
        ]
        for row in result["constant_rows"]
    ]
    chosen = [
        [
            f"{row['tc_over_tf']:g}",
            *(number(value) for value in row["step_ms"].values()),
            row["best_m"],
            row["auto_m"],
            f"{row['auto_over_best']:.2f}x",
        ]
        for row in result["constant_batch"]
    ]
    hops = result["hops_ms"]
    return "\n\n".join(
        [
            f"T_a {number(hops['t_a'])} ms, T_e {number(hops['t_e'])} ms, rows of a micro-batch "
            f"held at {result['shape']['rows']}:",
            table(["T_c / T_f", "m", "step ms", "formula ms", "reached", "throughput"], rows),
            "The batch held constant, step ms for each m, and what `auto` settles on:",
            table(["T_c / T_f", *_steps(result), "best m", "auto's m", "auto / best"], chosen),
        ]
    )


def _steps(result: Result) -> list[str]:
    return [f"m = {m}" for m in result["constant_batch"][0]["step_ms"]]


def scheduler_overhead(result: Result) -> str:
    """Lay out the policy's time per step."""
    return table(
        ["running sequences", "micro-batches", "schedule ms", "update ms", "p50 ms", "p99 ms"],
        (
            [
                *(row["num_running"], row["micro_batches"]),
                *(number(row[f"{name}_ms_p50"]) for name in ("schedule", "update", "total")),
                number(row["total_ms_p99"]),
            ]
            for row in result["rows"]
        ),
    )


def gateway(result: Result) -> str:
    """Lay out added latency per rate, and the highest rate sustained."""
    rows = [
        [
            *(number(row["rate"]), row["groups"], number(row["achieved"])),
            *(number(row["latency_ms"][name]) for name in ("p50", "p99")),
            number(row["gateway_cpu_us_per_token"]),
        ]
        for row in result["rows"]
    ]
    headings = ["tokens/s asked", "groups", "achieved", "added p50 ms", "p99 ms", "CPU us/token"]
    sustained = number(result["sustained_tokens_per_s"])
    return f"{table(headings, rows)}\n\nHighest rate sustained: {sustained} tokens/s."


def startup(result: Result) -> str:
    """Lay out seconds until each phase's end, and memory by role."""
    times = [[name, number(value)] for name, value in result["seconds"].items()]
    memory = [[name, number(value)] for name, value in result["pss_mb"].items()]
    return "\n\n".join(
        [
            f"{result['model']}, {result['weights_mb']:.0f} MB of weights:",
            table(["until", "seconds"], times),
            table(["memory (PSS) of", "MB"], memory),
        ]
    )


def load_client(result: Result) -> str:
    """Lay out the load tester's own speed."""
    return table(
        ["streams", "events/s", "CPU us/event", "CPU share", "lag p99 ms", "saturated"],
        (
            [
                *(row["streams"], number(row["events_per_s"]), number(row["cpu_us_per_event"])),
                *(percent(row["cpu_share"]), number(row["loop_lag_p99_ms"])),
                "yes" if row["saturated"] else "no",
            ]
            for row in result["rows"]
        ),
    )


def cpu_kernels(result: Result) -> str:
    """Lay out shares of the roofline, a table per model with a column per number of rows."""
    parts = []
    for cores, row in result["ceilings"].items():
        parts.append(
            f"{cores.replace('_', ' ').capitalize()}: {number(row['read_gb_per_s'])} GB/s read, "
            f"{number(row['bf16_gflop_per_s'])} GFLOP/s in bf16."
        )
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        found: dict[tuple[str, str], dict[int, str]] = {}
        for row in result["rows"]:
            if row["model"] == model:
                key = (row["op"], str(row["context"] or row["precision"]))
                share = percent(row["fraction"])
                cell = share if row["cold"] else f"({share})"
                found.setdefault(key, {})[row["rows"]] = f"{cell} {number(row['us_p50'])} us"
        counts = sorted({rows for cells in found.values() for rows in cells})
        headings = [model, "weights or context", *(f"{rows} rows" for rows in counts)]
        parts.append(
            table(headings, ([*key, *(c.get(n, "") for n in counts)] for key, c in found.items()))
        )
    return "\n\n".join(parts)


def gpu_decode(result: Result) -> str:
    """Lay out decode and prefill on a GPU."""
    figures = measured(result)
    rows = [
        (
            f"decode, batch {each['batch']}, context {each['context']}",
            number(each["step_ms"]),
            number(each["tokens_per_s"]),
            f"{each['fraction']:.0%}",
            "-" if each["goal"] is None else f"{each['goal']:.0%}",
        )
        for each in figures
        if each["of"] == "decode"
    ]
    rows += [
        (
            f"prefill, {each['tokens']} tokens",
            number(each["ms"]),
            number(each["tokens_per_s"]),
            "-",
            "-",
        )
        for each in figures
        if each["of"] == "prefill"
    ]
    return table(["what", "ms", "tokens/s", "of the byte floor", "goal"], rows)


def gpu_rooflines(result: Result) -> str:
    """Lay out a GPU's kernels with its limits."""
    rows = (
        (
            each["op"],
            each["shape"],
            number(each["us"]),
            f"{each['fraction']:.0%}",
            each["bound"],
            number(each["library_us"]),
        )
        for each in measured(result)
        if each["of"] == "kernel"
    )
    return table(["kernel", "size", "us", "of the limit", "bound", "torch, us"], rows)


def measured(result: Result) -> Sequence[Mapping[str, Any]]:
    """Return the figures of a GPU's result; raise ConfigError if it has no speeds."""
    if result["quick"] or not result["complete"]:
        raise ConfigError(f"{result['benchmark']}: not a complete run at real sizes")
    figures: Sequence[Mapping[str, Any]] = result["figures"]
    return figures


# The name of a result and of its table -> its layout.
LAYOUTS: dict[str, Layout] = {
    "cost-model": cost_model,
    "cpu_kernels": cpu_kernels,
    "disaggregation": disaggregation,
    "disaggregation-686m": disaggregation,
    "gateway": gateway,
    "gpu-decode": gpu_decode,
    "gpu-rooflines": gpu_rooflines,
    "load_client": load_client,
    "local_layers": local_layers,
    "m2n": m2n,
    "payload": payload,
    "peers-one-user-qwen3-moe-686m": peers,
    "peers-one-user-qwen3-moe-686m-int4": peers,
    "peers-one-user-smollm2-moe": peers,
    "peers-qwen3-moe-686m": peers,
    "peers-qwen3-moe-686m-int4": peers,
    "peers-smollm2-moe": peers,
    "peers-smollm2-moe-int4": peers,
    "pingpong": pingpong,
    "placement": placement,
    "quantization": quantization,
    "retrieval": retrieval,
    "scheduler_overhead": scheduler_overhead,
    "sensitivity": sensitivity,
    "spec": spec,
    "startup": startup,
    "vs_transformers": vs_transformers,
}
