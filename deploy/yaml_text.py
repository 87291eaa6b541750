"""Trees as YAML that people read: keys in their order, nothing by reference."""

from __future__ import annotations

from typing import Any

import yaml

from topspin.plan.strict_yaml import PlainDumper


def yaml_text(*documents: Any) -> str:
    """Return the documents, one after the other."""
    return yaml.dump_all(documents, Dumper=PlainDumper, sort_keys=False, width=100)
