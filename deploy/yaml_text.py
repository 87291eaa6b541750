"""Trees as YAML that people read: keys in their order, nothing by reference."""

from __future__ import annotations

from typing import Any

import yaml

# libyaml is ten times as fast; PyYAML may be built without it.
_Safe: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_Safe):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True


def yaml_text(*documents: Any) -> str:
    """Return the documents, one after the other."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)
