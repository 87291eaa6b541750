"""Draws the Pareto front of a report: price and TPOT, with tokens per second as size.

Needs matplotlib (pip install -e '.[plots]'). Called by deploy.placement.command.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from deploy.placement.report import Report
from topspin.errors import ConfigError


def draw(report: Report, path: Path) -> None:
    """Write the picture; raises ConfigError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--picture: needs matplotlib: pip install -e '.[plots]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    most = max(point.tokens_per_s for point in report.front)
    chosen = {(engine.engine, engine.copies) for engine in report.engines}
    dots = axes.scatter(
        [point.price_per_hour for point in report.front],
        [point.tpot_s * 1e3 for point in report.front],
        s=[30 + 170 * point.tokens_per_s / most for point in report.front],
        c=[point.ttft_s * 1e3 for point in report.front],
        edgecolors=[
            "red" if (point.engine, point.copies) in chosen else "none" for point in report.front
        ],
        cmap="viridis",
    )
    figure.colorbar(dots, label="TTFT, ms")
    axes.set_xlabel("price per hour")
    axes.set_ylabel("TPOT, ms")
    axes.set_title("Engines that none beats; size: tokens/s; red: the plan", fontsize=10)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
