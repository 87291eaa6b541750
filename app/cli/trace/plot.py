"""The Gantt chart of the rally: one lane per node, one colour per micro-batch.

Owns the picture and nothing else; needs matplotlib (the extra `plots`), which is imported
only when a picture is drawn. Called by command.py and by benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from app.cli.trace.report import Lane, Span
from topspin.errors import ConfigError
from topspin.trace import WHOLE_STEPS, Kind

# Okabe and Ito's palette: told apart without red and green.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
_OTHER_COLOUR = "#B0B0B0"
_LAYERS_SHOWN = 6


def draw_gantt(
    lanes: Sequence[Lane], path: Path, *, title: str, start_ns: int, end_ns: int
) -> None:
    """Draw the nodes' activity from `start_ns` to `end_ns`, in the form that the file's name says.

    Raises ConfigError if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install -e '.[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    shown = [lane for lane in lanes if lane.role != "scheduler"]
    figure, axes = pyplot.subplots(figsize=(12, 1.2 + 0.7 * len(shown)), layout="constrained")
    used: set[int] = set()
    for row, lane in enumerate(shown):
        spans = [s for s in lane.spans if s.end_ns > start_ns and s.start_ns < end_ns]
        for span in spans:
            if span.is_wait or span.start_ns == span.end_ns:
                continue
            if span.kind not in WHOLE_STEPS:
                used.add(span.micro_batch)
            axes.broken_barh(
                [((span.start_ns - start_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6)],
                (row - 0.38, 0.76),
                facecolors=_colour(span),
                linewidth=0,
            )
    axes.set_yticks(range(len(shown)), [lane.name for lane in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, (end_ns - start_ns) / 1e6)
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10)
    handles = [Patch(color=COLOURS[mb % 4], label=f"micro-batch {mb}") for mb in sorted(used)]
    handles.append(Patch(color=_OTHER_COLOUR, label="plan, sampling, drafts"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _colour(span: Span) -> str:
    return _OTHER_COLOUR if span.kind in WHOLE_STEPS else COLOURS[span.micro_batch % len(COLOURS)]


def gantt_window(lanes: Sequence[Lane], *, num_layers: int = _LAYERS_SHOWN) -> tuple[int, int]:
    """Return the times between which `num_layers` layers of a step in the middle were served.

    Raises ConfigError if the trace holds no step.
    """
    attention = [lane for lane in lanes if lane.role == "attention" and lane.spans]
    if not attention:
        raise ConfigError("the trace holds no step: was the engine idle?")
    spans = attention[0].spans
    steps = sorted({span.step for span in spans if span.kind == Kind.DISPATCHED})
    if not steps:
        raise ConfigError("the trace holds no step of a model with experts")
    step = steps[len(steps) // 2]
    own = [s for s in spans if s.step == step and s.kind == Kind.ATTENTION]
    layers = sorted({span.layer for span in own})
    middle = max(0, (len(layers) - num_layers) // 2)
    wanted = set(layers[middle : middle + num_layers])
    inside = [span for span in own if span.layer in wanted]
    return min(s.start_ns for s in inside), max(s.end_ns for s in inside)
