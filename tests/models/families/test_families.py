"""A family is one short file, and its names stand nowhere else in the product."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from models.families import FAMILIES
from server.gateway.parsing.call_formats import FORMATS

ROOT = Path(__file__).parents[3]
PRODUCT = ("app", "topspin", "models", "kernels", "m2n_comm", "spec_decode", "attention_nodes")
OTHERS = ("expert_nodes", "draft_nodes", "server", "deploy")
MOST_LINES = 150
# The default model is made as a Mixtral checkpoint from a Llama in a GGUF file.
MAKERS = "models/sources"


def test_a_family_is_a_short_file() -> None:
    for family in FAMILIES.values():
        file = Path(inspect.getfile(family.parts))
        assert file.parent == ROOT / "models/families"
        assert len(file.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_no_family_is_named_elsewhere() -> None:
    names = {name for each in FAMILIES.values() for name in (each.model_type, each.architecture)}
    names -= FORMATS.keys()  # tool calls have vLLM's names, some of which are a family's too
    files = [file for folder in (*PRODUCT, *OTHERS) for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    named = {
        str(place)
        for file in files
        if (place := file.relative_to(ROOT)).parent not in (Path("models/families"), Path(MAKERS))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert named == set()
