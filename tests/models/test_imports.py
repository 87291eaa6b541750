"""The modules of models/ that the server imports do not import torch."""

from __future__ import annotations

import subprocess
import sys

TORCH_FREE = (
    "checkpoints.checkpoint_index",
    "description.config",
    "families",
    "rope",
    "sources.hub",
    "text.chat_template",
    "text.tokenizer",
)


def test_the_servers_modules_import_no_torch() -> None:
    imports = "; ".join(f"import models.{name}" for name in TORCH_FREE)
    code = (
        f"import sys; {imports}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
