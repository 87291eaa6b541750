"""The loss of quality by attention to few retrieved keys, and the time that it saves.

Three parts, each by itself with --parts: quality (real queries and keys of the model, and many ways
to choose keys: benchmarks.retrieval.quality), tasks (servers answer questions about long texts,
dense and with budgets: benchmarks.retrieval.tasks), speed (steps and attention by the length of the
context: benchmarks.retrieval.speed). The text is this repository's own. Flags that it does not know
go to `topspin serve`. Run as

    topspin bench retrieval [MODEL] [--parts quality,tasks,speed]

Fails if retrieval was asked for and no layer selected keys: then nothing was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.experiment import COLOURS, Experiment, Result, ended_by_signals
from benchmarks.retrieval import quality, speed, tasks
from benchmarks.retrieval.flags import DENSE, RetrievalFlags
from benchmarks.retrieval.layout import layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit status. Raises TopspinError if a part fails."""
    parser = EXPERIMENT.parser(
        rounds=3, folder=Path(), epilog="All other flags go to topspin serve."
    )
    asked = RetrievalFlags.read(parser, argv)
    names = ("positions", "texts", "questions", "steps", "rounds", "seed")
    result: dict[str, Any] = {
        "model": asked.args.model,
        "settings": {
            "flags": asked.flags,
            "tokens": len(asked.tokens),
            **{name: getattr(asked.args, name) for name in names},
        },
    }
    with ended_by_signals():
        for part in asked.parts:
            result[part] = MEASURES[part](asked)
    return EXPERIMENT.finish(asked.args, result)


MEASURES: Final = {"quality": quality.measure, "tasks": tasks.measure, "speed": speed.measure}


def draw(result: Result, figure: Figure) -> None:
    """Draw errors by budget and by distance, and times by context, of the parts measured."""
    panels = ["budgets", "distances"] if "quality" in result else []
    panels += ["steps", "attention"] if "speed" in result else []
    figure.set_size_inches(5.5 * max(1, len(panels)), 4.6)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for idx, (name, xs, ys) in enumerate(_lines(panel, result)):
            dash = "--" if idx >= len(COLOURS) else "-"
            axes.plot(xs, ys, dash, marker="o", color=COLOURS[idx % len(COLOURS)], label=name)
        x, y = _AXES[panel]
        axes.set(xlabel=x, ylabel=y)
        if panel != "distances":
            axes.set_xscale("log", base=2)
        if panel in ("budgets", "attention"):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(color="#EEEEEE")
        axes.legend(fontsize=8, frameon=False)
        axes.set_title("abcd"[place], loc="left", fontsize=10)
    figure.suptitle(Path(result["model"]).name, fontsize=11)


_AXES: Final = {
    "budgets": ("keys attended to", "error of the attention's output"),
    "distances": ("tokens generated since the prompt", "error of the attention's output"),
    "steps": ("context, tokens", "ms a step, 1 request"),
    "attention": ("context, tokens", "us a layer: search and attention"),
}


def _lines(panel: str, result: Result) -> list[tuple[str, list[int], list[float]]]:
    """Return the name, the places and the values of each line of a panel."""
    if panel == "budgets":
        budgets = result["quality"]["text"]["budgets"].values()
        xs = [each["tokens"] for each in budgets]
        return [
            (method, xs, [each["methods"][method]["error"] for each in budgets])
            for method in quality.METHODS
        ]
    if panel == "distances":
        found = result["quality"]["generation"]
        return [(name, found["distances"], errors) for name, errors in found["errors"].items()]
    rows = result["speed"]["rows"]
    xs = [row["context"] for row in rows]
    key = {"steps": "step_ms", "attention": "attention_us"}[panel]
    return [
        (
            name if name == DENSE else f"retrieval, {name} tokens",
            xs,
            [row["servers"][name][key] for row in rows],
        )
        for name in rows[0]["servers"]
    ]


EXPERIMENT: Final = Experiment("retrieval", __doc__, layout, draw)


if __name__ == "__main__":
    raise SystemExit(main())
