"""Debian's container engine with a storage of its own, and images in it that no registry gives.

Owns finding the tools, their settings, a base image made of Debian's packages, the build of our
Dockerfile with this machine's pip, and what a container uses. Knows no test.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
BASE, IMAGE = "localhost/python:3.11-slim-bookworm", "localhost/topspin:tests"
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
TOOLS = ("podman", "buildah", "runc", "mmdebstrap", "iptables", "catatonit", "netavark")
ON_PATH = f"{os.environ['PATH']}:/usr/sbin:/usr/lib/podman"
SETTINGS = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{0}/tmp"
[network]
network_backend = "netavark"
network_config_dir = "{0}/networks"
[containers]
log_driver = "k8s-file"
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"""
STORAGE = """
[storage]
driver = "overlay"
graphroot = "{0}/store"
runroot = "{0}/run"
"""


def why_not() -> str | None:
    """Return why no container runs here; None: one may."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=ON_PATH) is None]
    if missing:
        return f"no containers here: apt-get install {' '.join(missing)} aardvark-dns"
    return None if os.geteuid() == 0 else "containers are run as root, with limits of cgroups"


class Podman:
    """podman and buildah, whose images and containers are below `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._environment = {
            **os.environ,
            "BUILDAH_ISOLATION": "chroot",
            "DISABLE_HC_SYSTEMD": "true",  # there may be no systemd; tests ask for health
        }
        for name, text in (("CONTAINERS_CONF", SETTINGS), ("CONTAINERS_STORAGE_CONF", STORAGE)):
            (directory / name).write_text(text.format(directory))
            self._environment[name] = str(directory / name)

    def call(
        self,
        *command: str,
        check: bool = True,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; shows its output where it must succeed and does not."""
        environment = self._environment | dict(variables or {})
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr}"
        return done

    def __call__(self, *arguments: str) -> str:
        """Return the output of podman."""
        return self.call("podman", *arguments).stdout.strip()

    def has(self, image: str) -> bool:
        """Say whether an image is there."""
        return self.call("podman", "image", "exists", image, check=False).returncode == 0

    def make_base(self) -> bool:
        """Make the Dockerfile's base image of Debian's packages; returns whether they came."""
        archive = str(self.directory / "base.tar")
        make = ("mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", archive)
        if self.call(*make, check=False).returncode != 0:
            return False
        container = self.call("buildah", "from", "scratch").stdout.strip()
        self.call("buildah", "add", container, archive, "/")
        self.call("buildah", "commit", "--rm", container, BASE)
        return True

    def build(self) -> None:
        """Build our image, with pip as it is configured here."""
        settings = pip_settings()
        file = self.directory / "pip.conf"
        file.write_text("\n".join(["[global]", *(f"{key}={text}" for key, text in settings)]))
        mounts = {str(file): "/etc/pip.conf"} | {
            path: path for _, text in settings for path in named_paths(text)
        }
        self.call(
            *("buildah", "bud", "--network", "host", "--target", "cpu", "--tag", IMAGE),
            *("--build-arg", f"PYTHON_IMAGE={BASE}"),
            *(f"--volume={source}:{target}:ro" for source, target in mounts.items()),
            str(REPOSITORY),
        )

    def remove_all(self) -> None:
        """End and remove all that is in this storage."""
        self.call("podman", "system", "reset", "--force", check=False)
        shutil.rmtree(self.directory)


def pip_settings() -> list[tuple[str, str]]:
    """Return what pip is configured to do here; the environment's wins."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(\S+)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    return list({key: text for _, key, text in sorted(found, reverse=True)}.items())


def named_paths(text: str) -> list[str]:
    """Return the files that a setting names, and the folders: whole indexes link to one another."""
    paths = [Path(each.removeprefix("file://")) for each in text.split()]
    found = [path for path in paths if path.is_absolute() and path.exists()]
    return [str(path if path.is_file() else Path(*path.parts[:3])) for path in found]


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])
