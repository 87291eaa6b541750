"""Specs of objects whose form no plan changes: a YAML file each, with `${names}` to fill in.

Owns their reading. What an object is called and how it is labelled is objects.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, Final

import yaml

from deploy.kubernetes.objects import Object
from deploy.services.engine import Engine

_FOLDER: Final = Path(__file__).parent


def spec(name: str, engine: Engine, **values: object) -> Object:
    """Return the spec `name`, of an engine and with all the values that it leaves open.

    A value keeps its type where it is all of a field.
    """
    tree = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    found: Object = _filled(tree, {"name": engine.asked.name, "engine": engine.name, **values})
    return found


def _filled(tree: Any, values: Mapping[str, object]) -> Any:
    """Return a tree with its texts filled in: after parsing, as a name may mean something there."""
    if isinstance(tree, dict):
        return {key: _filled(each, values) for key, each in tree.items()}
    if isinstance(tree, list):
        return [_filled(each, values) for each in tree]
    if not isinstance(tree, str):
        return tree
    is_whole = tree.startswith("${") and tree.index("}") == len(tree) - 1
    return values[tree[2:-1]] if is_whole else Template(tree).substitute(values)
