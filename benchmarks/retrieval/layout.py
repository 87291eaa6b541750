"""The tables of a result of `topspin bench retrieval`. Called by benchmarks.retrieval.command."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.experiment import Result, TextTable, number, table


def layout(result: Result) -> Iterator[TextTable | str]:
    """Yield the tables of the parts that were measured."""
    if "quality" in result:
        yield from _quality(result["quality"])
    if "tasks" in result:
        yield _tasks(result["tasks"])
    if "speed" in result:
        yield from _speed(result["speed"])


def _quality(quality: Result) -> Iterator[TextTable | str]:
    text, generation = quality["text"], quality["generation"]
    budgets = text["budgets"]
    yield (
        f"Error of the attention's output (recall of the best keys), at {text['positions']} "
        f"positions of the last quarter of {text['tokens']} tokens:"
    )
    columns = {"": "{method}"}
    for name, each in budgets.items():
        cell = f"{{{name}[error]:.4f}} ± {{{name}[error_noise]:.4f}} ({{{name}[recall]:.0%}})"
        columns[f"{name}: {each['tokens']} keys"] = cell
    methods = next(iter(budgets.values()))["methods"]
    yield table(
        columns,
        (
            {"method": method, **{name: each["methods"][method] for name, each in budgets.items()}}
            for method in methods
        ),
    )
    yield (
        f"The same with {generation['budget']} keys, by tokens generated behind a prompt of "
        f"{generation['prompt']}; the one codebook is that of the prompt's first segment:"
    )
    distances = generation["distances"]
    # As many columns as fit a page.
    shown = range(len(distances) - 1, -1, -max(1, len(distances) // 8))[::-1]
    columns = {str(distances[idx] + 1): f"{{errors[{idx}]:.4f}}" for idx in shown}
    errors = generation["errors"].items()
    yield table({"": "{name}", **columns}, ({"name": n, "errors": each} for n, each in errors))


def _tasks(tasks: Result) -> TextTable:
    dense, *budgets = next(iter(tasks.values()))["found"]
    columns = {
        "facts found": "{kind}",
        "asked": "{asked}",
        "with all keys": f"{{found[{dense}]}}",
        **{name: f"{{found_of_dense[{name}]}} of {{found[{dense}]}}" for name in budgets},
    }
    return table(columns, ({"kind": kind, **each} for kind, each in tasks.items()))


def _speed(speed: Result) -> Iterator[TextTable | str]:
    names = list(speed["rows"][0]["servers"])
    dense, budgets = names[0], names[1:]

    def cells(key: str, servers: Result) -> list[str]:
        base = servers[dense][key]
        return [
            number(base),
            *(f"{number(servers[n][key])} ({base / servers[n][key]:.2f}x)" for n in budgets),
        ]

    headings = ["dense", *(f"{name} keys" for name in budgets)]
    yield (
        "Median step (ms) of one request, and search and attention of a layer (us); in brackets "
        "how many times faster than dense:"
    )
    yield TextTable(
        ["context", *headings, *(f"layer, {each}" for each in headings)],
        [
            [str(row["context"])]
            + [cell for key in ("step_ms", "attention_us") for cell in cells(key, row["servers"])]
            for row in speed["rows"]
        ],
    )
    prompts = speed["prompts"]
    ratios = ", ".join(f"{prompts['median_ratio'][name]:.3f}x with {name} keys" for name in budgets)
    yield (
        f"Time to the first token of a prompt of {prompts['tokens']} tokens: "
        f"{number(statistics.median(prompts['rounds'][dense]))} s dense, {ratios}."
    )
