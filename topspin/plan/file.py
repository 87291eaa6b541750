"""The text form of an engine plan: YAML, read and printed.

Owns the form: fields in the order of the structs, without those of a node or a precision rule that
hold their defaults, and without `local_experts` and `network` if there are none. A plan that is
printed, read and printed again is the same text. Knows no other field.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from topspin.errors import ConfigError
from topspin.plan.rules.checks import check_plan
from topspin.plan.spec import EnginePlan
from topspin.plan.strict_yaml import PlainDumper, StrictLoader

WIDTH = 100


def read_plan(path: str) -> EnginePlan:
    """Return the plan in the YAML file at `path`.

    Raises ConfigError naming the file and the field for a plan that is no plan, or that no
    engine could run (topspin.plan.rules.checks).
    """
    try:
        tree = yaml.load(Path(path).read_text(), Loader=StrictLoader)
        plan = msgspec.convert(tree, EnginePlan)
        check_plan(plan)
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror}") from error
    # ValueError: no UTF-8, a date that is none, a ConfigError of the check.
    except (yaml.YAMLError, msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"--plan {path}: {error}") from error
    return plan


def print_plan(plan: EnginePlan) -> str:
    """Return `plan` as YAML."""
    tree = msgspec.to_builtins(plan)
    for name in ("local_experts", "network"):
        if tree[name] is None:
            del tree[name]
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=WIDTH)


class _Dumper(PlainDumper):
    """Prints lists of numbers and names on one line."""

    def represent_sequence(
        self, tag: str, sequence: Any, flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        is_short = not any(isinstance(each, dict | list) for each in sequence)
        node: yaml.SequenceNode = super().represent_sequence(
            tag, sequence, flow_style=is_short or None
        )
        return node
