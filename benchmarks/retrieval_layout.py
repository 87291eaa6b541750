"""The layout of a result of `topspin bench retrieval` as markdown; see benchmarks.table_layouts."""

from __future__ import annotations

import statistics

from benchmarks.markdown import Result, number, table


def retrieval(result: Result) -> str:
    """Lay out `topspin bench retrieval`, the parts that were measured."""
    parts = []
    if "quality" in result:
        parts += _retrieval_quality(result["quality"])
    if "tasks" in result:
        parts += _retrieval_tasks(result["tasks"])
    if "speed" in result:
        parts += _retrieval_speed(result["speed"])
    return "\n\n".join(parts)


def _retrieval_quality(quality: Result) -> list[str]:
    text, generation = quality["text"], quality["generation"]
    budgets = text["budgets"]
    rows = [
        [
            method,
            *(
                f"{figures['error']:.4f} ± {figures['error_noise']:.4f} ({figures['recall']:.0%})"
                for figures in (each["methods"][method] for each in budgets.values())
            ),
        ]
        for method in next(iter(budgets.values()))["methods"]
    ]
    distances = generation["distances"]
    # As many columns as fit a page.
    shown = range(len(distances) - 1, -1, -max(1, len(distances) // 8))[::-1]
    return [
        f"Error of the attention's output (recall of the best keys), at {text['positions']} "
        f"positions of the last quarter of {text['tokens']} tokens:",
        table(["", *(f"{name}: {each['tokens']} keys" for name, each in budgets.items())], rows),
        f"The same with {generation['budget']} keys, by tokens generated behind a prompt of "
        f"{generation['prompt']}; the one codebook is that of the prompt's first segment:",
        table(
            ["", *(distances[idx] + 1 for idx in shown)],
            (
                [name, *(f"{errors[idx]:.4f}" for idx in shown)]
                for name, errors in generation["errors"].items()
            ),
        ),
    ]


def _retrieval_tasks(tasks: Result) -> list[str]:
    budgets = list(next(iter(tasks.values()))["found"])
    rows = [
        [
            kind,
            each["asked"],
            each["found"][budgets[0]],
            *(
                f"{each['found_of_dense'][name]} of {each['found'][budgets[0]]}"
                for name in budgets[1:]
            ),
        ]
        for kind, each in tasks.items()
    ]
    return [table(["facts found", "asked", "with all keys", *budgets[1:]], rows)]


def _retrieval_speed(speed: Result) -> list[str]:
    names = list(speed["rows"][0]["servers"])
    dense, budgets = names[0], names[1:]

    def cells(key: str, servers: Result) -> list[str]:
        base = servers[dense][key]
        return [
            number(base),
            *(f"{number(servers[n][key])} ({base / servers[n][key]:.2f}x)" for n in budgets),
        ]

    headings = ["dense", *(f"{name} keys" for name in budgets)]
    prompts = speed["prompts"]
    ratios = ", ".join(f"{prompts['median_ratio'][name]:.3f}x with {name} keys" for name in budgets)
    return [
        "Median step (ms) of one request, and search and attention of a layer (us); in brackets "
        "how many times faster than dense:",
        table(
            ["context", *headings, *(f"layer, {each}" for each in headings)],
            (
                [
                    row["context"],
                    *cells("step_ms", row["servers"]),
                    *cells("attention_us", row["servers"]),
                ]
                for row in speed["rows"]
            ),
        ),
        f"Time to the first token of a prompt of {prompts['tokens']} tokens: "
        f"{number(statistics.median(prompts['rounds'][dense]))} s dense, {ratios}.",
    ]
