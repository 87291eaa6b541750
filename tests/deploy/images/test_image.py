"""The image without a container engine: what is in it, who runs it, what it may write.

`python -m tests.deploy.images.test_image` writes the pinned versions anew, from this environment.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.images.compile_kernels import kernels
from deploy.services.contained import MODELS
from deploy.services.engine import HTTP_PORT, SPILL
from deploy.services.processes import CACHE, ENVIRONMENT, INIT, RUN, USER
from kernels.cpu.compiled.runtime import PREPARED_VARIABLE
from kernels.cpu.simd.matmul import HAS_TILES

ROOT = Path(__file__).parents[3]
CONSTRAINTS = ROOT / "deploy" / "images" / "constraints.txt"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {
    name.removesuffix("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
}
MAX_BYTES = 8 * 2**20


class Instruction(NamedTuple):
    """One instruction of a Dockerfile."""

    word: str
    rest: str


def stages() -> dict[str, list[Instruction]]:
    """Return the instructions of each stage of the Dockerfile, by name."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    found: dict[str, list[Instruction]] = {}
    for line in filter(None, map(str.strip, lines)):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            current: list[Instruction] = []
            found[rest.partition(" AS ")[2]] = current
        elif found:
            current.append(Instruction(word, rest))
    return found


def test_what_runs_has_one_folder_of_the_build_and_no_compiler() -> None:
    final = stages()["cpu"]
    copies = [each.rest for each in final if each.word in ("COPY", "ADD")]
    assert copies == ["--from=build /opt/topspin /opt/topspin"]
    for each in final:
        assert not re.search(r"\b(apt-get|gcc|pip|curl)\b", each.rest), each


def test_both_images_run_as_the_same_user() -> None:
    """The one for GPUs adds the compiler that Triton needs, and nothing else."""
    root, compiler, user = stages()["cuda"]
    assert (root, user) == (("USER", "0:0"), ("USER", f"{USER}:{USER}"))
    assert "install -y --no-install-recommends gcc libc6-dev " in compiler.rest


def test_every_stage_is_of_an_image_or_an_earlier_stage() -> None:
    """buildah 1.28 takes the name of a stage in a variable for that of an image."""
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^FROM (.+)$", text, re.MULTILINE) == [
        "${PYTHON_IMAGE} AS build",
        "${PYTHON_IMAGE} AS cpu",
        "cpu AS cuda",
    ]


def test_what_runs_is_what_the_manifests_expect() -> None:
    last = {each.word: each.rest for each in stages()["cpu"]}
    assert last["USER"] == f"{USER}:{USER}"
    assert last["EXPOSE"] == str(HTTP_PORT)
    assert last["ENTRYPOINT"] == json.dumps([*INIT, "topspin"])
    built = " ".join(each.rest for each in stages()["build"])
    assert f"/opt/topspin/bin/{INIT[0]}" in built
    folders = next(each.rest for each in stages()["cpu"] if "install -d" in each.rest)
    plain, scratch = (each.split() for each in folders.split(" && "))
    assert plain == f"install -d -o {USER} -g {USER} {MODELS} {SPILL}".split()
    assert scratch == f"install -d -o {USER} -g {USER} -m 1777 {CACHE} {RUN}".split()
    variables = dict(re.findall(r"(\w+)=(\S+)", last["ENV"]))
    shared = set(ENVIRONMENT) & set(variables)
    assert shared >= {"TOPSPIN_CACHE", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "HOME"}
    for name in shared:
        assert variables[name] == ENVIRONMENT[name]
    compile_it = next(each.rest for each in stages()["build"] if "compile_kernels" in each.rest)
    assert f"NUMBA_CACHE_DIR={variables[PREPARED_VARIABLE]} " in compile_it


def is_sent(path: str) -> bool:
    """Say whether a file reaches the build, by the rules of .dockerignore: the last one counts."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        parts = path.split("/")
        heads = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if pattern.startswith("**/"):
            taken = any(fnmatch.fnmatch(part, pattern[3:]) for part in parts)
        else:
            taken = any(head.count("/") == pattern.count("/") and fnmatch.fnmatch(head, pattern)
                        for head in heads)  # fmt: skip
        if taken:
            sent = line.startswith("!")
    return sent


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [each for each in listed.stdout.splitlines() if (ROOT / each).exists()]


def test_only_what_is_installed_reaches_the_build() -> None:
    sent = [path for path in tracked() if is_sent(path)]
    tops = {path.partition("/")[0] for path in sent}
    assert tops == PACKAGES | {"pyproject.toml", "README.md", "LICENSE"}
    assert sum((ROOT / path).stat().st_size for path in sent) < MAX_BYTES
    for junk in (".git/config", ".venv/bin/python", "keys/expert/expert.secret", "api-keys"):
        assert not is_sent(junk)
    for junk in ("topspin/__pycache__/a.pyc", "tests/a.py", "benchmarks/results/m2n.json"):
        assert not is_sent(junk)
    for copied in (each.rest for each in stages()["build"] if each.word == "COPY"):
        source = copied.split()[0]
        assert source == "." or is_sent(source), source


def runtime_closure() -> dict[str, str]:
    """Return the versions of all packages that ours needs, as they are installed here."""
    found: dict[str, str] = {}
    waiting = [Requirement(each) for each in PROJECT["project"]["dependencies"]]
    while waiting:
        asked = waiting.pop()
        name = canonicalize_name(asked.name)
        extras = asked.extras or {""}
        if name in found:
            continue
        distribution = importlib.metadata.distribution(name)
        found[name] = distribution.version.partition("+")[0]
        for text in distribution.requires or ():
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return found


def pinned() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_all_that_is_needed_is_pinned() -> None:
    versions = pinned()
    for text in PROJECT["project"]["dependencies"]:
        asked = Requirement(text)
        assert asked.specifier.contains(versions[canonicalize_name(asked.name)]), text
    here = runtime_closure()
    if here["torch"] == versions["torch"]:  # hosts with GPUs have packages of their own
        assert set(here) <= set(versions)


@pytest.mark.slow
def test_the_installed_package_runs_without_its_sources(tmp_path: Path) -> None:
    """By the image's user, with nothing to write but one folder."""
    source, site, own = tmp_path / "src", tmp_path / "site", tmp_path / "cache"
    for path in filter(is_sent, tracked()):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    names = {path.name for path in site.iterdir() if path.is_dir() and "-" not in path.name}
    assert names - {"bin"} == PACKAGES
    for path in filter(is_sent, tracked()):
        if not path.endswith((".md", "LICENSE", "pyproject.toml", "constraints.txt")):
            assert (site / path).exists(), path
    own.mkdir()
    render = ["deploy", "render", "--plan", str(ROOT / "docs/plans/unequal.yaml")]
    for arguments in (["--version"], [*render, "-o", str(own / "out")]):
        program = f"import sys; sys.argv[1:] = {arguments!r}; import app.cli.main as m; "
        program += (
            f"import pathlib; assert pathlib.Path(m.__file__).is_relative_to({str(site)!r}); "
        )
        program += "sys.exit(m.main())"
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "HOME": str(own)},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_kernels_for_the_image_are_found() -> None:
    names = [kernel.name for kernel in kernels()]
    assert len(names) > 25
    assert {"_attend", "_experts", "_linear"} <= set(names)
    assert ("_attend_latents" in names) == HAS_TILES, "LLVM ends a process that compiles it"


if __name__ == "__main__":
    lines = [f"{name}=={version}" for name, version in sorted(runtime_closure().items())]
    head = "# Written by `python -m tests.deploy.images.test_image`: all that the image installs.\n"
    CONSTRAINTS.write_text(head + "\n".join(lines) + "\n")
