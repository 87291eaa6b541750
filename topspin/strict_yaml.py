"""YAML without surprises: a mapping that has a key twice is refused, not cut.

Called by topspin.plan_file and by deploy.placement.documents.
"""

from __future__ import annotations

from typing import Any

import yaml


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML libraries keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for idx, key in enumerate(keys):
            if key in keys[:idx]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", node.value[idx][0].start_mark
                )
        return super().construct_mapping(node, deep)
