"""Specs of objects whose form no plan changes: a YAML file each, with `${names}` to fill in.

Owns their reading. What an object is called and how it is labelled is objects.py's.
"""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from string import Template
from typing import Final

import yaml

from deploy.kubernetes.objects import Object
from deploy.services.engine import Engine

_FOLDER: Final = Path(__file__).parent


def spec(name: str, engine: Engine, **values: object) -> Object:
    """Return the spec `name`, of an engine and with all the values that it leaves open."""
    text = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    known = {"name": engine.asked.name, "engine": engine.name}
    return deepcopy(_parsed(Template(text).substitute(known, **values)))


@lru_cache
def _parsed(text: str) -> Object:
    """Return what `text` says, read once for all the pods that have it in common."""
    found: Object = yaml.safe_load(text)
    return found
