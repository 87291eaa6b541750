"""The properties of rules' texts, against the texts."""

from __future__ import annotations

import random

from server.gateway.grammars.rules import GrammarRule, Rules, shapes_of

NUM_RULES = 5
MAX_LENGTH = 6


def texts_of(rules: Rules) -> dict[str, set[str]]:
    """Return all texts of at most MAX_LENGTH characters of rules that use earlier ones only."""
    found = {
        '"a"': {"a"},
        '"b"': {"b"},
        '"bc"': {"bc"},
        "/[a-b]/": {"a", "b"},
        "/[^a]/": {"b", "c"},
    }

    def joined(one: set[str], other: set[str]) -> set[str]:
        return {first + last for first in one for last in other if len(first + last) <= MAX_LENGTH}

    for key, rule in rules.items():
        once: set[str] = set()
        for alternative in rule.alternatives:
            made = {""}
            for symbol in alternative:
                made = joined(made, found[symbol])
            once |= made
        power, found[key] = {""}, set()
        for num in range(MAX_LENGTH + 1 if rule.most is None else rule.most + 1):
            found[key] |= power if num >= rule.least else set()
            power = joined(power, once)
    return found


def bits(characters: set[str]) -> int:
    return sum(1 << ord(each) for each in characters)


def test_shapes_hold_for_all_texts() -> None:
    rng = random.Random(0)
    num_exact = 0
    for _ in range(300):
        rules: Rules = {}
        for idx in range(NUM_RULES):
            symbols = ['"a"', '"b"', '"bc"', "/[a-b]/", "/[^a]/", *rules, *rules]
            alternatives = [
                rng.choices(symbols, k=rng.randrange(4)) for _ in range(rng.choice([1, 1, 2]))
            ]
            least, most = rng.choice([(1, 1), (1, 1), (0, 1), (1, None), (0, None), (2, 2), (1, 2)])
            rules[f"x{idx}"] = GrammarRule(alternatives, least, most)
        found = texts_of(rules)
        shapes = shapes_of(rules)
        for key, texts in found.items():
            more = {
                text[length]
                for text in texts
                for length in range(len(text))
                if text[:length] in texts
            }
            if key in rules:
                shape = shapes[key]
                assert shape.is_empty is ("" in texts), (rules, key)
                assert bits({text[:1] for text in texts} - {""}) & ~shape.first == 0, (rules, key)
                assert bits(more) & ~shape.more == 0, (rules, key)
                assert bits(set("".join(texts))) & ~shape.characters == 0, (rules, key)
                num_exact += bits(more) == shape.more != shape.characters
    assert num_exact > 100
