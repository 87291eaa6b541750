"""The words of the code: heads of modules are noun phrases."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    *("app", "topspin", "models", "kernels", "m2n_comm", "spec_decode", "attention_nodes"),
    *("expert_nodes", "draft_nodes", "server", "deploy", "benchmarks", "tests"),
)
QUESTIONS = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why"}


def test_no_module_opens_with_a_question() -> None:
    heads = {
        file: (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split()
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
    }
    assert len(heads) > 500
    assert [str(file) for file, words in heads.items() if set(words[:1]) & QUESTIONS] == []
