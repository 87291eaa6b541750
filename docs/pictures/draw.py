"""Draws the pictures of docs/concepts.md: `python docs/pictures/draw.py`.

Owns their content. A picture is a grid of cells of 20 pixels, with boxes, arrows and words on it;
a test holds the files to what is drawn here.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

CELL: Final = 20
FOLDER: Final = Path(__file__).parent

ATTENTION, EXPERT, SERVER, DRAFT, IDLE = "#dbeafe", "#fde68a", "#e5e7eb", "#d1fae5", "#ffffff"


class Picture:
    """An SVG that is written as it is drawn; positions and sizes in cells."""

    def __init__(self, width: float, height: float) -> None:
        self._size = width * CELL, height * CELL
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, text: str, fill: str) -> None:
        """Draw a box with words in its middle; a line break begins another line."""
        self._parts.append(
            f'<rect x="{x * CELL:g}" y="{y * CELL:g}" width="{width * CELL:g}" '
            f'height="{height * CELL:g}" rx="4" fill="{fill}" stroke="#374151"/>'
        )
        self.words(x + width / 2, y + height / 2, text)

    def words(self, x: float, y: float, text: str, *, anchor: str = "middle") -> None:
        """Write words around a point."""
        lines = text.split("\n")
        for place, line in enumerate(lines):
            down = y * CELL + 4 + 15 * (place - (len(lines) - 1) / 2)
            self._parts.append(
                f'<text x="{x * CELL:g}" y="{down:g}" text-anchor="{anchor}">{escape(line)}</text>'
            )

    def arrow(
        self, x: float, y: float, to_x: float, to_y: float, text: str = "", *, both: bool = False
    ) -> None:
        """Draw an arrow, with words above its middle."""
        start = ' marker-start="url(#head)"' if both else ""
        self._parts.append(
            f'<line x1="{x * CELL:g}" y1="{y * CELL:g}" x2="{to_x * CELL:g}" y2="{to_y * CELL:g}" '
            f'stroke="#374151" stroke-width="1.5" marker-end="url(#head)"{start}/>'
        )
        if text:
            self.words((x + to_x) / 2, (y + to_y) / 2 - 0.5, text)

    def __str__(self) -> str:
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" font-family="sans-serif" font-size="12">'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" '
            'fill="#374151"/></marker></defs><rect width="100%" height="100%" fill="#ffffff"/>'
        )
        return "\n".join([head, *self._parts, "</svg>"]) + "\n"


def roles() -> Picture:
    """Draw the processes of an engine, and what travels between them."""
    own = Picture(34, 15)
    own.box(1, 1, 6, 2, "clients", IDLE)
    own.box(11, 1, 6, 2, "gateways", SERVER)
    own.box(24, 1, 8, 2, "scheduler", SERVER)
    own.arrow(7, 2, 11, 2, "HTTP", both=True)
    own.arrow(17, 2, 24, 2, "requests, tokens", both=True)
    own.box(20, 6, 12, 3, "attention nodes\nall but routed experts, KV caches", ATTENTION)
    own.box(20, 12, 12, 2, "expert nodes: routed experts", EXPERT)
    own.box(3, 6, 10, 3, "draft nodes\na small model", DRAFT)
    own.arrow(28, 3, 28, 6, both=True)
    own.words(28.4, 4.6, "steps", anchor="start")
    own.arrow(13, 7.5, 20, 7.5, "drafts, verdicts", both=True)
    own.arrow(24, 9, 24, 12)
    own.words(23.6, 10.6, "rows, experts, weights", anchor="end")
    own.arrow(28, 12, 28, 9)
    own.words(28.4, 10.6, "sums", anchor="start")
    return own


def ping_pong() -> Picture:
    """Draw two micro-batches that take turns on both sides."""
    own = Picture(36, 9)
    for y, side in ((1, "attention"), (5, "experts")):
        own.words(0.3, y + 1, side, anchor="start")
    for turn in range(4):
        x = 6 + 7 * turn
        for batch, fill in enumerate((ATTENTION, DRAFT)):
            begin = x + 3.5 * batch
            own.box(begin, 1, 3.3, 2, f"{'AB'[batch]}, layer {turn}", fill)
            if begin + 7 <= 35:
                own.box(begin + 3.5, 5, 3.3, 2, f"{'AB'[batch]}, layer {turn}", fill)
                own.arrow(begin + 2.5, 3, begin + 4, 5)
            if turn:
                own.arrow(begin - 0.5, 5, begin + 0.8, 3)
    own.arrow(6, 8.2, 35, 8.2)
    own.words(20, 7.7, "time")
    return own


def m2n() -> Picture:
    """Draw who sends rows to whom."""
    own = Picture(30, 13)
    for node in range(2):
        own.box(1, 1 + 6 * node, 8, 4, f"attention {node}\nrows, chosen experts", ATTENTION)
    for node in range(3):
        own.box(21, 0.6 + 3.8 * node, 8, 2.8, f"expert node {node}", EXPERT)
        for source in range(2):
            own.arrow(9, 3 + 6 * source, 21, 2 + 3.8 * node, both=True)
    own.words(15, 12.2, "each pair: one frame out, one weighted sum per row back")
    return own


def speculation() -> Picture:
    """Draw a tree of drafts, and the branch that is kept."""
    own = Picture(34, 12)
    own.box(0.5, 5, 5, 2, "The cat", SERVER)
    for x, y, text, kept in (
        (9, 2, "sat", True),
        (9, 8, "ran", False),
        (16, 1, "on", True),
        (16, 4, "down", False),
        (23, 1, "my", False),
    ):
        own.box(x, y, 4.5, 2, text, DRAFT if kept else IDLE)
    own.arrow(5.5, 5.6, 9, 3.4)
    own.arrow(5.5, 6.4, 9, 8.6)
    own.arrow(13.5, 2.8, 16, 2.2)
    own.arrow(13.5, 3.4, 16, 4.8)
    own.arrow(20.5, 2, 23, 2)
    own.box(
        23,
        7.6,
        10,
        3.4,
        "one step of the model\nchecks all five: sat, on,\nthen its own: the",
        ATTENTION,
    )
    own.arrow(25.2, 3, 27, 7.6)
    return own


def retrieval() -> Picture:
    """Draw which keys a token attends to."""
    own = Picture(36, 10)
    own.box(1, 1, 4, 2, "first ones", ATTENTION)
    for segment in range(4):
        own.box(5.5 + 5 * segment, 1, 4.6, 2, "codes, 1024", EXPERT)
    own.box(25.7, 1, 9, 2, "recent keys, whole", ATTENTION)
    own.box(11, 6, 12, 2.4, "tables of the query: a number\nper code, added up", SERVER)
    for segment in range(4):
        own.arrow(7.8 + 5 * segment, 3, 13 + 2.5 * segment, 6)
    own.arrow(23, 7.2, 27.5, 7.2, "best")
    own.box(27.5, 6, 7.5, 2.4, "attention to\nthe asked number", ATTENTION)
    return own


def planner() -> Picture:
    """Draw what a plan is made from."""
    own = Picture(36, 11)
    for place, text in enumerate(("devices, measured", "model's config.json", "workload, limits")):
        own.box(1, 0.6 + 3.4 * place, 9, 2.4, text, SERVER)
        own.arrow(10, 1.8 + 3.4 * place, 14, 5.2)
    own.box(
        14, 3.4, 9, 3.6, "search: nodes, layers,\nprecision, batches\n(prefill and decode)", EXPERT
    )
    own.arrow(23, 4.4, 27, 2.6)
    own.arrow(23, 6, 27, 7.6)
    own.box(27, 1.4, 8, 2.4, "plan.yaml, which runs", ATTENTION)
    own.box(27, 6.4, 8, 2.4, "why not the others", IDLE)
    return own


def failover() -> Picture:
    """Draw a lost node, and what the others do."""
    own = Picture(36, 8)
    own.box(1, 1, 6.5, 3, "generation 4\n2 expert nodes", ATTENTION)
    own.arrow(7.5, 2.5, 12, 2.5, "one is lost")
    own.box(12, 1, 8, 3, "halt, form anew\ngeneration 5, 1 node", EXPERT)
    own.arrow(20, 2.5, 25, 2.5, "it is back")
    own.box(25, 1, 8, 3, "generation 6\n2 expert nodes", ATTENTION)
    own.words(
        17, 5.6, "requests go back to the queue with their tokens and are computed on from there;"
    )
    own.words(17, 6.6, "streams pause, lose nothing and repeat nothing")
    return own


PICTURES: Final = (roles, ping_pong, m2n, speculation, retrieval, planner, failover)


def main() -> None:
    """Write all pictures."""
    for draw in PICTURES:
        (FOLDER / f"{draw.__name__}.svg").write_text(str(draw()))


if __name__ == "__main__":
    main()
