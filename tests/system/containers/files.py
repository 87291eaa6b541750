"""Files of an engine in containers, made by the commands that docs/kubernetes.md gives.

Owns the plan, its rendering, and the keys. Knows no engine of containers.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path

from app.cli.main import main
from deploy.services.processes import USER
from tests.system.containers.podman import IMAGE

API_KEY = "a-key-of-the-tests-1234"
HEADERS = {"Authorization": f"Bearer {API_KEY}"}


def models_of(checkpoint: Path, directory: Path) -> Path:
    """Return a folder of models with a copy named tiny, which the image's user may read."""
    models = directory / "models"
    shutil.copytree(checkpoint, models / "tiny")
    for path in (models, *models.rglob("*")):
        path.chmod(0o755)
    return models


def render(
    model: Path | str,
    directory: Path,
    models: Path,
    *,
    transport: str,
    form: str,
    cache: str = "8MiB",
) -> Path:
    """Return the folder of an engine whose plan is as `topspin serve --print-plan` gives it."""
    flags = ("--layout", "shared", "--transport", transport, "--kv-cache-memory", cache)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["serve", str(model), *flags, "--print-plan"]) == 0
    plan, out = directory / "printed.yaml", directory / form
    plan.write_text(printed.getvalue())
    command = ["deploy", "render", "--plan", str(plan), "-o", str(out), "--format", form]
    assert main([*command, "--image", IMAGE, "--cpus", "1", "--models", str(models)]) == 0
    return out


def make_keys(out: Path) -> None:
    """Make the keys of a Compose file, and give them to the image's user."""
    assert main(["keys", str(out / "keys"), "--plan", str(out / "plan.yaml")]) == 0
    (out / "api-keys").mkdir()
    (out / "api-keys" / "api-keys").write_text(f"tests: {API_KEY}\n")
    for folder in (out / "keys", out / "api-keys"):
        for path in (folder, *folder.rglob("*")):
            os.chown(path, USER, USER)
            path.chmod(0o550 if path.is_dir() else 0o440)
