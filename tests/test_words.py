"""Words and shape of the code: heads are noun phrases, folders small, class names in one file."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = (
    *("app", "topspin", "models", "kernels", "m2n_comm", "spec_decode", "attention_nodes"),
    *("expert_nodes", "draft_nodes", "server", "deploy"),
)
FOLDERS = (*PRODUCT, "benchmarks", "tests")
# A folder with more has rooms.
MOST_MODULES = 15
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
QUESTIONS = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why"}


def test_no_module_opens_with_a_question() -> None:
    heads = {
        file: file.read_text(encoding="utf-8").removeprefix('"""').split(maxsplit=1)
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
    }
    assert len(heads) > 500
    assert [str(file) for file, words in heads.items() if set(words[:1]) & QUESTIONS] == []


def test_a_class_name_stands_in_one_file() -> None:
    files = defaultdict(set)
    for folder in PRODUCT:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for name in CLASS.findall(file.read_text(encoding="utf-8")):
                files[name].add(str(file.relative_to(ROOT)))
    assert len(files) > 500
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_a_folder_holds_few_modules() -> None:
    counts = Counter(
        str(file.parent.relative_to(ROOT))
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if file.name != "__init__.py"
    )
    assert len(counts) > 50
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}
