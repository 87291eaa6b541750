"""Strict YAML documents: the planner's cluster and workload files.

Owns the reading of a file into a msgspec struct, so that an unknown field, a key that is there
twice or a number out of range is refused by its name. Knows no field. Called by
deploy.placement.cluster and deploy.placement.workload.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import yaml

from topspin.errors import ConfigError
from topspin.plan.strict_yaml import StrictLoader

Document = TypeVar("Document", bound=msgspec.Struct)


class DocumentFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of a document; its `__post_init__` raises ConfigError for what cannot be."""


def read_document(option: str, path: Path, kind: type[Document]) -> Document:
    """Return the document at `path`; raises ConfigError with `option`, the file and the field."""
    try:
        tree = yaml.load(path.read_text(), Loader=StrictLoader)
        return msgspec.convert(tree, kind)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from error
    # ValueError: no UTF-8, a date that is none, a ConfigError of a field's check.
    except (yaml.YAMLError, msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{option} {path}: {error}") from error
