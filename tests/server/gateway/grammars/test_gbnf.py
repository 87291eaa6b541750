"""llama.cpp's EBNF as Lark: its language, against brute force, and what is refused."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.gateway.grammars.gbnf import MAX_REPEATS, MAX_RULE_DEPTH, MAX_RULES, is_gbnf, lark_of
from tests.checkpoints import EOS_TOKEN_ID, write_tokenizer
from tests.pairwise import few
from topspin.grammars import limits


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return LLTokenizer(str(directory / "tokenizer.json"), eos_token=EOS_TOKEN_ID)


class Language:
    """The texts that llguidance accepts for a grammar, as whole answers, byte by byte."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        lark = LLMatcher.grammar_from_lark(lark_of(grammar))
        self._matcher = LLMatcher(tokenizer, lark, log_level=0, limits=limits())
        assert not self._matcher.is_error(), self._matcher.get_error()
        self._tokens = {tokenizer.decode_bytes([idx]): idx for idx in range(260)}

    def __contains__(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        tokens = [self._tokens[bytes([byte])] for byte in text.encode()]
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def texts(alphabet: str, length: int) -> list[str]:
    """Return all texts of at most `length` characters."""
    every = (itertools.product(alphabet, repeat=num) for num in range(length + 1))
    return ["".join(each) for each in itertools.chain(*every)]


EXPRESSIONS = [
    ('word "b"\nword ::= [ab]+', r"[ab]+b"),
    ('[ab]* "ab"? [b]', r"[ab]*(ab)?b"),
    ('("a" | "ab") ("b" | "bba")', r"(a|ab)(b|bba)"),
    ('"ab" "c" | [a] "bb"', r"abc|abb"),
    ('word (", " | "c") word\nword ::= [a-b]{1,2}', r"[ab]{1,2}(, |c)[ab]{1,2}"),
    ('"a"{2} [^ab]{0,1} ("b"{1,} "c"){0,2}', r"a{2}[^ab]?(b+c){0,2}"),
    ('"a"{0} "b"{0,0} ("c" | )+ [ac]', r"c*[ac]"),
    ('("a" | "b"+ | ("c" "a")*)* "b"', r"(a|b|ca)*b"),
    ('"a" rest | ""\nrest ::= "b" rest | [bc]', r"(ab*[bc])?"),
    ('a-b_1 | start\nstart ::= "a" start | "c"\na-b_1 ::= "b" "a"?+', r"ba*|a*c"),
    ("[a-] . [^-]", r"(?s:[a-].[^\-])"),
]


@pytest.mark.parametrize("is_recursive", few([False, True], True))
@pytest.mark.parametrize(("body", "pattern"), EXPRESSIONS)
def test_expressions_mean_what_pythons_mean(
    tokenizer: LLTokenizer, body: str, pattern: str, is_recursive: bool
) -> None:
    """Also where recursion elsewhere makes each character a terminal of its own."""
    nested = ' | "(" root ")"' if is_recursive else ""
    language = Language(tokenizer, f"root ::= outer{nested}\nouter ::= {body}")
    for text in texts("abc-", 5):
        assert (text in language) is bool(re.fullmatch(pattern, text)), text


# Where parts may be terminals of their own, and must not be: their ends and beginnings meet.
RECURSIVE: list[tuple[str, list[str], list[str]]] = [
    (
        'root ::= part+\npart ::= "(" root ")" | tail | "b"\ntail ::= "a" ("b" "a")?',
        ["ab", "abab", "abb", "(ab)b", "aba(a)"],
        ["", "()", "(a"],
    ),
    (
        'root ::= "(" root ")" | x "d" | x\nx ::= "c"? ("b" | "cbd")',
        ["cbd", "bd", "cbdd", "(ccbdd)"],
        ["cc", "c", "bdd"],
    ),
    (
        'root ::= x root "." | "ab"\nx ::= "a" [b-d]*',
        ["ab", "aab.", "abab.", "abcaab.."],
        ["a", "aab", "abab"],
    ),
    (
        'root ::= "ab" root | "a" x "." | "cx"\nx ::= "b" "cd"',
        ["abcx", "ababcx", "abcd.", "ababcd."],
        ["ab", "abc", "abcd"],
    ),
    (
        'root ::= x y "b" | "(" root ")"\ny ::= "[" root "]" | ""\nx ::= "a" [ab]*',
        ["ab", "aab", "abb", "(a[ab]b)"],
        ["a", "b", "(a[ab])"],
    ),
    (
        'root ::= element\nelement ::= "<" name ">" (text | element)* "</" name ">"\n'
        "name ::= [a-z]+\ntext ::= [^<>]+",
        ["<a></b>", "<a>x y/<b></b>a</a>"],
        ["<a>", "<A></A>", "<a></a>x"],
    ),
]


SYMBOLS = ['"a"', '"b"', '"ab"', "[ab]", '"c"', '""', "root", "x", "y", "z"]
OPERATORS = ["", "", "", "*", "+", "?", "{2}", "{0,2}"]
Rules = dict[str, list[list[tuple[str, str]]]]


def derived(rules: Rules, length: int) -> dict[str, set[str]]:
    """Return each rule's texts of at most `length` characters, by trying every derivation."""
    found: dict[str, set[str]] = {name: set() for name in rules}
    found |= {symbol: {symbol.strip('"')} for symbol in SYMBOLS if symbol.startswith('"')}
    found["[ab]"] = {"a", "b"}

    def joined(first: set[str], second: set[str]) -> set[str]:
        return {one + two for one in first for two in second if len(one + two) <= length}

    def repeated(symbol: str, operator: str) -> set[str]:
        least, most = {"": (1, 1), "*": (0, length), "+": (1, length), "?": (0, 1)}.get(
            operator, (2, 2) if operator == "{2}" else (0, 2)
        )
        power, result = {""}, set[str]()
        for num in range(max(most, least) + 1):
            result |= power if num >= least else set()
            power = joined(power, found[symbol])
        return result

    while True:
        before = sum(map(len, found.values()))
        for name, alternatives in rules.items():
            for alternative in alternatives:
                made = {""}
                for symbol, operator in alternative:
                    made = joined(made, repeated(symbol, operator))
                found[name] |= made
        if sum(map(len, found.values())) == before:
            return found


def random_rules(rng: random.Random) -> Rules:
    """Return rules, of which `z` has no recursion."""
    rules = {
        name: [
            [(rng.choice(symbols), rng.choice(OPERATORS)) for _ in range(rng.randrange(4))]
            for _ in range(rng.randrange(1, 4))
        ]
        for name, symbols in (("root", SYMBOLS), ("x", SYMBOLS), ("y", SYMBOLS), ("z", SYMBOLS[:4]))
    }
    rules["root"].append([('"c"', ""), ("root", ""), ("z", rng.choice(OPERATORS))])
    return rules


@pytest.mark.parametrize("seed", few(range(2), 0))
def test_random_grammars_have_the_texts_that_they_derive(tokenizer: LLTokenizer, seed: int) -> None:
    rng = random.Random(seed)
    num_refused = 0
    for _ in range(60):
        rules = random_rules(rng)
        found = derived(rules, 4)
        grammar = "\n".join(
            f"{name} ::= "
            + " | ".join(" ".join(map("".join, alternative)) for alternative in alternatives)
            for name, alternatives in rules.items()
        )
        try:
            language = Language(tokenizer, grammar)
        except ValueError:
            assert not all(found[name] for name in rules), grammar
            num_refused += 1
            continue
        for text in texts("abc", 4):
            assert (text in language) is (text in found["root"]), (grammar, text)
    assert num_refused < 30


ARITHMETIC = r"""
# sums, a line each
root ::= (expr "=" blank term "\n")+
expr ::= term ([-+*/] term)*
term ::= name | number | "(" blank expr ")" blank
name ::= [a-z] [a-z0-9_]* blank
number ::= [0-9]+ blank
blank ::= [ \t\n]*
"""
JSON = r"""
root ::= value
value ::= (object | array | string | number | "true" | "false" | "null") space
object ::= "{" space (member ("," space member)*)? "}"
member ::= string ":" space value
array ::= "[" space (
    value ("," space value)*   # in a group, lines may end
)? "]"
string ::= "\"" ([^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" space
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
space ::= | " " | "\n" [ \t]{0,20}
"""
LIST = 'root ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"'
SHAPES: list[tuple[str, list[str], list[str]]] = [
    (
        ARITHMETIC,
        ["a=1\n", "(x_1 +2)*3= y\n", "1 = 2\n3 = 4\n"],
        ["", "a=1", "a=\n", "(a=1\n", "1+=2\n"],
    ),
    (LIST, ["- a\n", "- é, 1\n- b\n"], ["", "- \n", "- a", "- a\u2028\n"]),
]


@pytest.mark.parametrize(("grammar", "valid", "invalid"), RECURSIVE + SHAPES)
def test_grammars_have_these_texts_and_not_those(
    tokenizer: LLTokenizer, grammar: str, valid: list[str], invalid: list[str]
) -> None:
    language = Language(tokenizer, grammar)
    assert [text for text in valid if text not in language] == []
    assert [text for text in invalid if text in language] == []


def test_json(tokenizer: LLTokenizer) -> None:
    """Valid texts, and those that lack or have a character too many, against Python's parser."""
    language = Language(tokenizer, JSON)
    value: Any = {
        "a b": [1, -0.5, 1e30, True, None, {}],
        'é\n"\\': {"x": [[], "\u0001", "😀"]},
        "": "",
    }
    whole = json.dumps(value, indent=1)
    assert whole in language
    assert json.dumps(value) in language
    changes = [("", 1), (",", 0), ('"', 0), ("1", 0), ("]", 1)]
    for idx, (more, skip) in itertools.product(range(len(whole)), changes):
        text = whole[:idx] + more + whole[idx + skip :]
        try:
            json.loads(text)
        except ValueError:
            assert text not in language, text


ESCAPES = [
    (r'"\x41\u00e9\U0001F600\t\r\n\\\"\[\]\-"', 'Aé😀\t\r\n\\"[]-'),
    (r"[\x41] [\u00e0-\u00ff] [\U0001F600-\U0001F64F]", "Aé😁"),
    (r'[\]] [\\] [\-] [\[] [^\]] ["] [/] [^\n]', ']\\-[a"/é'),
    ('"\n" [\n] .', "\n\n\n"),
    ("[--/] [a-c-] [^^] [&~]", ".-a&"),
]


@pytest.mark.parametrize(("body", "text"), ESCAPES)
def test_escapes(tokenizer: LLTokenizer, body: str, text: str) -> None:
    for grammar in (f"root ::= {body}", f'root ::= x | "(" root ")"\nx ::= {body}'):
        language = Language(tokenizer, grammar)
        assert text in language
        assert text + "x" not in language
        assert "A" + text not in language


def test_long_texts_of_rules_that_end_with_themselves(tokenizer: LLTokenizer) -> None:
    for rest in ("", ' | "(" root ")"'):
        language = Language(tokenizer, f'root ::= item | item ", " root{rest}\nitem ::= [a-z]+')
        assert ", ".join(["ab"] * 2000) in language


REFUSED = [
    ("root ::= root", "`root` has no text that ends"),
    ('root ::= "a" | x\nx ::= [ab] y\ny ::= x', "has no text that ends"),
    ("root ::= x", "`x` is not defined"),
    ('start ::= "a"', "`root` is not defined"),
    ('root ::= "a"\nroot ::= "b"', "line 2.*defined twice"),
    ('root ::= ("a"', "is missing"),
    ('root ::= ("a"\nx ::= "b"', "is missing"),
    ('root ::= "a")', "no group is open"),
    ("root ::= +", "nothing to repeat"),
    ('root ::= "a', "does not end"),
    ("root ::= []", "class without characters"),
    ("root ::= [^]", "class without characters"),
    ("root ::= [z-a]", "range z-a is empty"),
    (r'root ::= "\q"', r"unknown escape \\q"),
    (r'root ::= "\x4"', r"unknown escape \\x"),
    (r'root ::= "\uD800"', "no character has the code D800"),
    (r"root ::= [\U00110000]", "no character has the code 110000"),
    ('root ::= "a"{3,2}', "first number is above the second"),
    (f'root ::= "a"{{{MAX_REPEATS + 1}}}', f"at most {MAX_REPEATS}"),
    ("root ::= !<x>", "only ids can be excluded"),
    ("root ::= 'a'", "line 1.*no part of EBNF"),
    ('// a comment\nroot ::= "a"', "name and `::=`|no part of EBNF"),
    (f"root ::= {'(' * MAX_RULE_DEPTH}[a]{')' * MAX_RULE_DEPTH}", f"more than {MAX_RULE_DEPTH}"),
    ("root ::= " + "([a])" * MAX_RULES, f"more than {MAX_RULES} rules"),
    (f"root ::= [a]{'+' * MAX_RULE_DEPTH}", f"more than {MAX_RULE_DEPTH}"),
]


@pytest.mark.parametrize(("grammar", "reason"), REFUSED)
def test_what_has_no_meaning_is_refused_with_the_reason(grammar: str, reason: str) -> None:
    assert is_gbnf(grammar)
    with pytest.raises(ValueError, match=reason):
        lark_of(grammar)


def test_limits_are_reached(tokenizer: LLTokenizer) -> None:
    depth = MAX_RULE_DEPTH - 1
    for nested in ("", ' | "b" root "b"'):
        deep = f"root ::= {'(' * depth}[a]{')' * depth}{nested}"
        assert "a" in Language(tokenizer, deep)
        many = Language(tokenizer, f'root ::= [a-z]{{{MAX_REPEATS}}} ("b" "c"){{0,5}}{nested}')
        assert "a" * MAX_REPEATS + "bc" * 5 in many
        assert "a" * (MAX_REPEATS - 1) not in many


def test_tokens(tokenizer: LLTokenizer) -> None:
    lark = lark_of('root ::= <[5]> !<[6]> <|im_end|> "a"')
    assert lark == 'start: r0\nr0: <[5]> <[^6]> <|im_end|> "a"'


@pytest.mark.parametrize(
    ("text", "is_it"),
    [
        ('root ::= "a"', True),
        ('\n # root: a\n\n\troot-1   ::= "a"', True),
        ('<root> ::= "a"', True),
        ('start: "a ::= b"', False),
        ('start: "a" // x ::= y', False),
        ('# x ::= y\nstart: "a"', False),
        ("start: /x ::= y/", False),
        ('%llguidance {}\nstart: "::="', False),
        ("# # # # " * 10_000, False),
    ],
)
def test_only_what_begins_as_ebnf_is_taken_for_it(text: str, is_it: bool) -> None:
    assert is_gbnf(text) is is_it
