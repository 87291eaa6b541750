"""YAML without surprises: a key that is there twice is refused, and nothing is by reference.

Owns how YAML is read and printed. Knows no document. Called by topspin.plan.file,
deploy.placement.documents and deploy.yaml_text.
"""

from __future__ import annotations

from typing import Any

import yaml

# libyaml reads a plan of 1,000 nodes in 0.1 s instead of 1.2; PyYAML may be built without it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class StrictLoader(_Loader):  # type: ignore[misc]
    """Refuses a key that a mapping has twice, of which YAML libraries keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for idx, key in enumerate(keys):
            if key in keys[:idx]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", node.value[idx][0].start_mark
                )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class PlainDumper(_Dumper):  # type: ignore[misc]
    """Repeats what is there twice: people who read it look up no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
