"""The reasoning that a model writes between `<think>` and `</think>` before its answer.

Owns the split of a message's text into both. Whether a message begins inside the block, since
the prompt ends with `<think>`, is told by the caller. Pure.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from server.gateway.parsing.markers import num_held

BEGIN = "<think>"
END = "</think>"


def begins_inside(prompt: str, continued: str) -> bool:
    """Return whether the text after `prompt` is reasoning.

    `continued` is the part of it that the model has begun to say, if any. Only there, and at the
    very end, does a mark count: others may be quoted.
    """
    return continued.rfind(BEGIN) > continued.rfind(END) or prompt.rstrip().endswith(BEGIN)


def is_over(prompt: str, continued: str) -> bool:
    """Return whether the text after `prompt` follows on reasoning, or on an answer without any.

    A template ends the prompt with a whole block, or only the mark of its end, where it turns
    reasoning off. `continued` is as in begins_inside.
    """
    if begins_inside(prompt, continued):
        return False
    return bool(continued.strip()) or prompt.rstrip().endswith(END)


class Split(NamedTuple):
    """More of the reasoning, and more of the text after it."""

    reasoning: str
    answer: str


class ReasoningSplit:
    """Splits one message. Line breaks around the reasoning are not shown.

    `ended_by` is another mark that ends the reasoning, and belongs to the answer (empty: none).
    """

    def __init__(self, *, is_inside: bool, ended_by: str = "") -> None:
        self._ends = tuple(filter(None, (END, ended_by)))
        self._state: Literal["before", "inside", "behind", "answer"] = (
            "inside" if is_inside else "before"
        )
        self._held = ""
        self._has_begun = False

    @property
    def is_inside(self) -> bool:
        """Whether the next text is reasoning, as far as can be told."""
        return self._state == "inside"

    @property
    def place(self) -> Literal["undecided", "reasoning", "answer"]:
        """Where the text so far ends; line breaks behind the reasoning still belong to it."""
        if self._state == "before":
            return "undecided"
        return "answer" if self._state == "answer" else "reasoning"

    def push(self, text: str) -> Split:
        """Return what of `text`, and of that held back, is certain."""
        reasoning, self._held = "", self._held + text
        if self._state == "before":
            shown = self._held.lstrip()
            if not shown or (BEGIN.startswith(shown) and shown != BEGIN):
                return Split("", "")
            is_inside = shown.startswith(BEGIN)
            self._state = "inside" if is_inside else "answer"
            self._held = shown[len(BEGIN) :] if is_inside else self._held
        if self._state == "inside":
            reasoning = self._take_reasoning()
        if self._state == "behind":
            self._held = self._held.lstrip("\n")
            self._state = "answer" if self._held else "behind"
        if self._state != "answer":
            return Split(reasoning, "")
        answer, self._held = self._held, ""
        return Split(reasoning, answer)

    def _take_reasoning(self) -> str:
        if not self._has_begun:
            self._held = self._held.lstrip("\n")
            self._has_begun = bool(self._held)
        found = [begin for end in self._ends if (begin := self._held.find(end)) >= 0]
        if found:
            reasoning, self._held = self._held[: min(found)], self._held[min(found) :]
            self._held = self._held.removeprefix(END)
            self._state = "behind"
            return reasoning.rstrip("\n")
        certain = self._held[: len(self._held) - num_held(self._held, *self._ends)]
        shown = certain.rstrip("\n")
        self._held = self._held[len(shown) :]
        return shown

    def flush(self) -> Split:
        """Return the text held back, as none follows."""
        held, self._held = self._held, ""
        return Split(held, "") if self._state == "inside" else Split("", held)
