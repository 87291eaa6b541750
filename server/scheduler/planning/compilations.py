"""Which grammars the attention nodes compile, and which they have compiled.

Owns that list only: a request with a grammar waits in the queue, holding up nobody, until every
node that was asked has answered, so that no step compiles. The list is a hint and may be wrong: a
node that lacks a grammar compiles it when a sequence comes. Knows no requests. Called by policy.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from topspin.errors import EngineUnavailable
from topspin.grammars import grammar_key
from topspin.messages import CompileGrammar

# Nodes remember more; those that they use most lately are the same.
MAX_KNOWN = 128
# More would only wait for one another.
MAX_UNDER_WAY = 64


class Compilations:
    """The grammars by their keys.

    Invariant: a key is under way while one of the nodes it awaits has not answered.
    """

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_found = 0
        self._awaited: dict[str, set[int]] = {}
        self._known: OrderedDict[str, None] = OrderedDict()
        self._unsent: list[CompileGrammar] = []

    def ask(self, grammar: str, nodes: Collection[int], *, may_refuse: bool = True) -> str:
        """Have `nodes` compile a grammar unless they have, or are about to; returns its key.

        If too many are under way it raises EngineUnavailable, or if it may not refuse, leaves it to
        the node that gets the sequence.
        """
        key = grammar_key(grammar)
        if key in self._known or key in self._awaited:
            self.num_found += 1
            if key in self._known:
                self._known.move_to_end(key)
            return key
        is_full = len(self._awaited) >= MAX_UNDER_WAY
        if is_full and may_refuse:
            raise EngineUnavailable(f"{MAX_UNDER_WAY} grammars are being compiled")
        if nodes and not is_full:
            self.num_asked += 1
            self._awaited[key] = set(nodes)
            self._unsent.append(CompileGrammar(key=key, grammar=grammar))
        return key

    def take_unsent(self) -> list[CompileGrammar]:
        """Return what is to be sent to all attention nodes, once."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def is_under_way(self, key: str) -> bool:
        """Return whether a request with this grammar has to wait."""
        return key in self._awaited

    def answered(self, node: int, key: str, *, is_refused: bool) -> None:
        """Note a node's answer; one that refuses ends the wait for the others."""
        awaited = self._awaited.get(key)
        if awaited is None:
            return  # another node has refused it, or the nodes were halted
        awaited.discard(node)
        if is_refused:
            del self._awaited[key]
        elif not awaited:
            del self._awaited[key]
            self._known[key] = None
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def halt(self) -> None:
        """Await nothing: nodes may be lost, or may not have read what they were asked."""
        self._awaited.clear()
        self._known.clear()
        self._unsent.clear()
