"""Detection of a node that answers in time, and whose results are not numbers.

Owns the rule and what it has seen. A prompt that makes the model overflow fails its own request
only: a step counts against nodes if rows of two different prompts are not numbers, or all of its
rows, and two prompts must be hit in all. Steps without sampled rows say nothing. Three steps in a
row that count are a verdict.

Whom to blame: experts serve all attention nodes alike, so wrong rows of one among several are its
own, and those of all come from experts. Which of them cannot be told, and one node may be alone;
then it is tried out: the first verdict names the likeliest, and each further one somebody who has
not been named, until all have been. Pure: no tensor, no time. Fed by policy.py; service.py asks for
the verdict at every result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from server.scheduler.nodes.roster import Member
from server.scheduler.planning.in_flight import NodePart
from topspin.messages import NOT_NUMBERS

# So many steps in a row are a verdict.
NUM_STEPS = 3


class StepRows(NamedTuple):
    """One attention node's sampled rows in a step: prompts whose are wrong; are any right?"""

    wrong: frozenset[int]
    any_right: bool

    @property
    def counts(self) -> bool:
        """Say whether the step counts against nodes."""
        return len(self.wrong) > 1 or (bool(self.wrong) and not self.any_right)


def rows_of(part: NodePart, errors: Mapping[int, str]) -> StepRows:
    """Return the rows of a node's part of a step that it has answered with `errors`.

    Prompts are told apart by their tokens: a client may send one again, or ask for many choices.
    """
    seqs = part.seqs if errors else ()
    wrong = [seq.request for seq in seqs if errors.get(seq.seq_id) == NOT_NUMBERS]
    prompts = (each.tokens[: each.num_prompt_tokens].tobytes() for each in wrong)
    return StepRows(frozenset(map(hash, prompts)), any(part.tokens))


@dataclass(slots=True)
class _Run:
    """The last steps in a row that count, of one attention node, and their prompts."""

    num_steps: int = 0
    prompts: set[int] = field(default_factory=set)


class WrongRows:
    """The runs of all attention nodes of one engine, and the nodes that were blamed.

    While `runs` is empty, steps without errors need not be heard.
    """

    def __init__(self) -> None:
        self.runs: dict[int, _Run] = {}
        self._blamed: set[Member] = set()

    def heard(self, rows: Mapping[int, StepRows]) -> None:
        """Note a step's rows, by attention node."""
        for index, found in rows.items():
            run = self.runs.setdefault(index, _Run())
            if found.counts:
                run.num_steps += 1
                run.prompts |= found.wrong
            elif found.any_right:
                self.runs[index] = _Run()
        if not any(run.num_steps for run in self.runs.values()):
            self.runs.clear()

    def forget(self) -> None:
        """Begin anew with the next step: another generation begins."""
        self.runs.clear()

    def take_verdict(self, nodes: Collection[Member]) -> Member | None:
        """Return, once, which of `nodes`, the engine's, counts as lost."""
        over = {
            index
            for index, run in self.runs.items()
            if run.num_steps >= NUM_STEPS and len(run.prompts) > 1
        }
        if not over:
            return None
        is_right = any(run.num_steps == 0 for run in self.runs.values())
        self.forget()
        experts = sorted((each for each in nodes if each.role == "expert"), key=str)
        own = [Member("attention", index) for index in sorted(over)]
        suspects = [*own, *experts] if is_right else [*experts, *own]
        if self._blamed.issuperset(suspects):
            self._blamed.clear()
        blamed = next(each for each in suspects if each not in self._blamed)
        self._blamed.add(blamed)
        return blamed
