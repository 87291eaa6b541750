"""Chat templates of our own with the Jinja features, marks and traps of newer families'."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_NAMES: Final = ("deepseek_v3", "deepseek_v31", "kimi_k2", "glm47")
TEMPLATES: Final = {
    name: Path(__file__).with_name(f"{name}.jinja").read_text(encoding="utf-8").rstrip("\n")
    for name in _NAMES
}
# As R1-0528's: content is searched before it is known to be there.
TEMPLATES["deepseek_r1"] = TEMPLATES["deepseek_v3"].replace(
    "{%- elif message['role'] == 'assistant' and",
    "{%- elif message['role'] == 'assistant' and not '</think>' in message['content'] and",
)
