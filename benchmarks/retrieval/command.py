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

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.experiment import COLOURS, Experiment, Result, check_positive, say
from benchmarks.load.arguments import numbers
from benchmarks.load.started_server import ended_by_signals
from benchmarks.local_model import BLOCK_SIZE, LocalModel
from benchmarks.retrieval import quality, speed, tasks
from benchmarks.retrieval.layout import layout
from benchmarks.retrieval.tasks import DENSE
from benchmarks.servers.topspin import add_server_arguments
from kernels.contracts import SEGMENT_KEYS
from models.description.config import load_model_config
from models.sources.hub import resolve_model
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError
from topspin.plan.retrieval import MIN_TOKENS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS: Final = ("quality", "tasks", "speed")
TEXTS: Final = ("README.md", "CONTRIBUTING.md", "docs/api.md")
# Flags of `topspin serve` that the benchmark sets.
_OWNED: Final = ("--kv-retrieval-tokens", "--port", "--host", "--served-model-name")
# Keys behind the last coded one that are attended to anyway.
_UNCODED_KEYS: Final = 64


@dataclass(frozen=True)
class Plan:
    """The checked request of the command line; `flags` are those of `topspin serve`."""

    args: argparse.Namespace
    flags: list[str]
    path: Path
    parts: list[str]
    contexts: list[int]
    budgets: list[int]
    text: str
    tokens: list[int]
    """The first ones of the text: as many as --tokens, or as the model can read."""

    @classmethod
    def of(cls, argv: Sequence[str] | None) -> Plan:
        """Read the flags; make all checks that need no model in memory."""
        args, flags = _parser().parse_known_args(argv)
        for flag in flags:
            if flag.partition("=")[0] in _OWNED:
                raise ConfigError(f"{flag}: the benchmark sets it itself")
        check_positive(args, ("tokens", "texts", "questions", "steps", "rounds", "start_timeout"))
        if args.questions > tasks.MOST_QUESTIONS:
            raise ConfigError(
                f"--questions {args.questions}: a text has facts for {tasks.MOST_QUESTIONS}"
            )
        if args.positions < 2:
            raise ConfigError(f"--positions is {args.positions}; noise is told of 2 or more")
        asked = args.parts.split(",")
        if unknown := set(asked) - set(PARTS):
            raise ConfigError(
                f"--parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}"
            )
        contexts, budgets = _whole("--contexts", args.contexts), _whole("--budgets", args.budgets)
        if min(budgets) < MIN_TOKENS:
            raise ConfigError(f"--budgets {min(budgets)}: at least {MIN_TOKENS}")
        least = max(SEGMENT_KEYS, max(budgets) + _UNCODED_KEYS + 1)
        for context in contexts:
            if context < least or context % BLOCK_SIZE:
                raise ConfigError(
                    f"--contexts {context}: must be {least} or more, for something to select, and "
                    f"whole blocks of {BLOCK_SIZE}"
                )
        path = resolve_model(args.model)
        text = _read(args.text)
        ids = Tokenizer.from_directory(path).encode(text, add_special_tokens=True)
        length = min(args.tokens, load_model_config(path).context_length) // BLOCK_SIZE * BLOCK_SIZE
        if len(ids) < length:
            raise ConfigError(
                f"the text has {len(ids)} tokens, fewer than {length}; give a longer --text, or "
                "fewer --tokens"
            )
        parts = [part for part in PARTS if part in asked]
        return cls(args, flags, path, parts, contexts, budgets, text, ids[:length])


def _whole(flag: str, text: str) -> list[int]:
    return [int(each) for each in numbers(flag, text, whole=True)]


def _read(file: Path | None) -> str:
    """Return the text of `file`; None: the repository's own texts, one behind the other."""
    root = Path(__file__).parents[2]
    files = [file] if file is not None else [root / name for name in TEXTS]
    try:
        return "\n\n".join(each.read_text(encoding="utf-8") for each in files)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; give a file as --text") from error


def _parser() -> argparse.ArgumentParser:
    parser = EXPERIMENT.parser(
        rounds=3, folder=Path(), epilog="All other flags go to topspin serve."
    )
    add_server_arguments(parser)
    parser.add_argument("--parts", default=",".join(PARTS), metavar="P,P", help="(%(default)s)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="(this repository's texts)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=8192,
        metavar="N",
        help="of the text, at most what the model can read (%(default)s)",
    )
    parser.add_argument(
        "--positions", type=int, default=32, metavar="N", help="queries a text (%(default)s)"
    )
    parser.add_argument("--texts", type=int, default=2, metavar="N", help="a task (%(default)s)")
    parser.add_argument(
        "--questions", type=int, default=20, metavar="N", help="about each text (%(default)s)"
    )
    parser.add_argument(
        "--contexts",
        default="2048,4096,6144,8192,16384,32768,65536",
        metavar="N,N",
        help="lengths of timed sequences (%(default)s)",
    )
    parser.add_argument(
        "--budgets", default="512,1024", metavar="N,N", help="keys in timed steps (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=64, help="timed (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    return parser


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit status. Raises TopspinError if a part fails."""
    plan = Plan.of(argv)
    args = plan.args
    names = ("positions", "texts", "questions", "steps", "rounds", "seed")
    result: dict[str, Any] = {
        "model": args.model,
        "settings": {
            "flags": plan.flags,
            "tokens": len(plan.tokens),
            **{name: getattr(args, name) for name in names},
        },
    }
    with ended_by_signals():
        for part in plan.parts:
            result[part] = _MEASURES[part](plan, _say_nothing if args.quiet else say)
    return EXPERIMENT.finish(args, result)


def _say_nothing(line: str) -> None:
    pass


def _quality(plan: Plan, say: quality.Say) -> dict[str, Any]:
    model, args = LocalModel(plan.path, num_blocks=len(plan.tokens) // BLOCK_SIZE), plan.args
    text = quality.measure_budgets(
        model, plan.tokens, num_positions=args.positions, seed=args.seed, say=say
    )
    prompt = plan.tokens[: len(plan.tokens) // 4]
    generation = quality.measure_generation(
        model, prompt, len(plan.tokens) - len(prompt), num_positions=args.positions, say=say
    )
    return {"text": text, "generation": generation}


def _tasks(plan: Plan, say: quality.Say) -> dict[str, Any]:
    args = plan.args
    return tasks.measure(
        plan.path,
        plan.text,
        num_tokens=len(plan.tokens),
        num_texts=args.texts,
        num_questions=args.questions,
        flags=plan.flags,
        seed=args.seed,
        folder=args.result_dir,
        start_timeout_s=args.start_timeout,
        say=say,
    )


def _speed(plan: Plan, say: quality.Say) -> dict[str, Any]:
    return speed.measure(
        plan.path,
        plan.tokens,
        contexts=plan.contexts,
        budgets=plan.budgets,
        num_steps=plan.args.steps,
        num_rounds=plan.args.rounds,
        say=say,
    )


_MEASURES: Final = {"quality": _quality, "tasks": _tasks, "speed": _speed}


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
