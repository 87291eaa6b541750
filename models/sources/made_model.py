"""A checkpoint directory that Topspin makes: complete or absent, and verifiable.

Owns its atomic creation (written to a temporary directory, renamed at the end), the lock that makes
concurrent makers wait, the manifest of the written files, and the progress bar. Knows no recipe;
models.sources.smollm2_moe calls it. Imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from topspin.errors import ConfigError

_MANIFEST = "topspin_manifest.json"
_SCRATCH = "scratch"


class Unwritable(ConfigError):
    """The place of a model that is to be made cannot be written."""


class MadeModel:
    """The directory `path`, made by `recipe` (any text; one of another recipe is incomplete)."""

    def __init__(self, path: Path, *, recipe: str) -> None:
        self.path = path
        self._recipe = recipe

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock for making this model; waits while another process has it.

        Raises Unwritable.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = (self.path.parent / f".{self.path.name}.lock").open("w")
        except OSError as error:
            raise Unwritable(f"{self.path.parent}: cannot be written: {error}") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def is_complete(self, *, verify: bool) -> bool:
        """Return whether every file of the manifest is there with its size.

        verify: also with its content, which reads everything.
        """
        try:
            manifest = json.loads((self.path / _MANIFEST).read_text(encoding="utf-8"))
            if manifest["recipe"] != self._recipe:
                return False
            for name, expected in manifest["files"].items():
                file = self.path / name
                if file.stat().st_size != expected["size_bytes"]:
                    return False
                if verify and _sha256(file) != expected["sha256"]:
                    return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return True

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Yield a temporary directory; on a clean exit it becomes `path`, else it is deleted.

        A subdirectory `scratch` is not kept. Call while `locked`: leftovers of a killed
        maker are removed first.
        """
        for left in self.path.parent.glob(f".{self.path.name}.*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
        try:
            yield directory
            shutil.rmtree(directory / _SCRATCH, ignore_errors=True)
            self._seal(directory)
            self._publish(directory)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written: {error}") from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _seal(self, directory: Path) -> None:
        """Write the manifest, and sync every file to the disk."""
        files = {
            file.name: {"size_bytes": file.stat().st_size, "sha256": _sha256(file)}
            for file in sorted(directory.iterdir())
        }
        manifest = {"recipe": self._recipe, "files": files}
        (directory / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        for file in directory.iterdir():
            file.chmod(0o644)
            with file.open("rb") as stream:
                os.fsync(stream.fileno())

    def _publish(self, directory: Path) -> None:
        # mkdtemp's directory is private; a model gets the cache's usual permissions.
        directory.chmod(0o755)
        if self.path.exists():
            # A directory cannot be replaced in one step: the broken one moves away first.
            broken = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
            os.rename(self.path, broken / "broken")
            os.rename(directory, self.path)
            shutil.rmtree(broken, ignore_errors=True)
        else:
            os.rename(directory, self.path)


class ProgressBar:
    """Shows the progress of making a model, one line per stage; nothing if disabled."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def stage(self, name: str, *, total: int | None = None) -> None:
        """Finish the previous stage and begin one of `total` steps (None: unknown length)."""
        self.finish()
        self._task = self._bar.add_task(name, total=total)

    def advance(self) -> None:
        """Count one step of the stage as done."""
        assert self._task is not None
        self._bar.advance(self._task)

    def finish(self) -> None:
        """Show the stage as done."""
        if self._task is not None:
            self._bar.update(self._task, total=1, completed=1)
            self._task = None


@contextmanager
def silent_or_bar(visible: bool) -> Iterator[ProgressBar]:
    """Yield a ProgressBar that draws on standard error while the block runs, if `visible`."""
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bar:
        report = ProgressBar(bar)
        yield report
        report.finish()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
