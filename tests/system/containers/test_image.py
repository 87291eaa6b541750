"""Our image: who runs in it, what may be written, what it has compiled."""

from __future__ import annotations

import pytest

from deploy.services.processes import CACHE, USER
from tests.system.containers.podman import IMAGE, Podman
from topspin import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
RUN = ("run", "--rm", "--read-only", "--cap-drop=all", "--network=none")
SCRATCH = f"--tmpfs={CACHE}:exec,mode=1777"
PYTHON = (*RUN, SCRATCH, "--entrypoint=python", IMAGE, "-c")
WHO = "import os, pathlib; print(os.getuid(), os.getgid()); pathlib.Path('file').touch()"
COMPILE = """
import logging
logging.basicConfig(level="INFO")
from deploy.images.compile_kernels import main
main()
"""


def test_it_runs_as_its_user_with_nothing_to_write_but_its_cache(podman: Podman) -> None:
    assert podman(*RUN, SCRATCH, IMAGE, "--version") == f"topspin {__version__}"
    assert podman(*PYTHON, WHO) == f"{USER} {USER}"
    for place in ("/file", "/opt/topspin/bin/file", "/topspin/models/file"):
        refused = podman.call("podman", *PYTHON, f"open({place!r}, 'w')", check=False).stderr
        assert "Read-only file system" in refused, place


def test_its_kernels_are_compiled_already(podman: Podman) -> None:
    done = podman.call("podman", *PYTHON, COMPILE)
    assert "kernels are compiled" in done.stdout
    assert "compiled kernel" not in done.stderr
