"""YAML without surprises: a mapping that has a key twice is refused, not cut.

Called by topspin.plan_file and by deploy.placement.documents.
"""

from __future__ import annotations

from typing import Any

import yaml

# libyaml reads a plan of 1,000 nodes in 0.1 s instead of 1.2; PyYAML may be built without it.
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class StrictLoader(_Safe):  # type: ignore[misc]
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
