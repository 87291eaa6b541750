"""The documentation: commands that exist, links that lead somewhere, messages that are said.

A block ```sh cluster needs a cluster or a container engine; its commands are read, not run.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli.main import _parser
from server.gateway.http.auth import ApiKeys, read_key_file
from topspin.messages import Tenant

ROOT = Path(__file__).parents[1]
KUSTOMIZE = os.environ.get("TOPSPIN_KUSTOMIZE") or shutil.which("kustomize")
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
# They are no commands of ours; what they do is in the text around them.
OTHERS = {"curl", "docker", "kubectl", "pip", "printf", "git", "export", "openssl", "cat", "sed"}
OTHERS |= {"claude"}


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the info string and the text of each fenced block."""
    pattern = r"^ *```([^\n]*)\n(.*?)^ *```$"
    yield from re.findall(pattern, page.read_text(), flags=re.MULTILINE | re.DOTALL)


def words_of(command: str) -> list[str] | None:
    """Return the words of the first command in a line; None: a quotation goes on."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:
        return None
    return list(itertools.takewhile(lambda word: not set(word) <= set("|&;<>"), words))


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the commands in blocks of shell, as words."""
    for info, text in blocks(page):
        if info.split()[:1] not in (["sh"], ["bash"], ["console"], []):
            continue
        # What a command reads from the page is none.
        text = re.sub(r"(<<'(\w+)')\n.*?^\2$", r"\1", text, flags=re.MULTILINE | re.DOTALL)
        pending = ""
        for line in text.replace("\\\n", " ").splitlines():
            pending = f"{pending}\n{line}" if pending else line
            words = words_of(pending)
            if words is None:
                continue
            pending = ""
            if words and (info.strip() or words[0] in ("topspin", "make")):
                yield words
        assert not pending, f"{page.name}: {pending}"


ALL = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)[:50]}")
    for page in PAGES
    for words in commands(page)
]


def test_there_are_commands() -> None:
    assert len(ALL) > 40


@pytest.mark.parametrize("words", ALL)
def test_a_command_is_one(words: list[str]) -> None:
    """Ours are taken by our own parser, with all their flags."""
    words = list(itertools.dropwhile(lambda word: re.match(r"[A-Za-z_]+=", word), words))
    if not words:
        return
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program == "topspin":
        _parser(arguments).parse_args([each for each in arguments if each != "..."])
    elif program == "make":
        names = [each for each in arguments if "=" not in each]
        assert set(names) <= TARGETS, names
    elif program == "python" and arguments[:1] == ["-m"]:
        assert importlib.util.find_spec(arguments[1]) is not None
    else:
        assert program in OTHERS, program


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http:", "https:")):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_every_page_is_reached_from_the_readme() -> None:
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        found = ((page.parent / target.partition("#")[0]).resolve() for target in links(page))
        waiting += [file for file in found if file.suffix == ".md"]
    assert set(PAGES) <= seen


def test_pictures_are_what_is_drawn() -> None:
    folder = ROOT / "docs" / "pictures"
    draw: Any = runpy.run_path(str(folder / "draw.py"))
    pictures = {f"{each.__name__}.svg": str(each()) for each in draw["PICTURES"]}
    assert {file.name: file.read_text() for file in folder.glob("*.svg")} == pictures
    page = (ROOT / "docs" / "concepts.md").read_text()
    for name, text in pictures.items():
        xml.etree.ElementTree.fromstring(text)
        assert f"](pictures/{name})" in page


def test_the_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_messages_of_the_troubleshooting_page_are_said() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = page.partition("## It does not start")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `((?:[^`]|\\`)+)` \|", section, flags=re.MULTILINE)
    assert len(quoted) > 12
    folders = ("app", "topspin", "models", "server", "m2n_comm")
    sources = [file.read_text() for name in folders for file in (ROOT / name).rglob("*.py")]
    # Messages are cut into lines of source; both sides without those cuts.
    said = [re.sub(r'"\s+f?"', "", text) for text in sources]
    own = {"Address already in use"}  # the kernel's
    for text in set(quoted) - own:
        assert any(text.replace("\\`", "`") in each for each in said), text


def test_the_steps_before_a_cluster_run(tmp_path: Path) -> None:
    """The blocks of docs/kubernetes.md that need no cluster, as they are, one after the other."""
    model = ROOT / "tests" / "deploy" / "placement" / "models" / "smollm2-moe"
    steps = [text for info, text in blocks(ROOT / "docs" / "kubernetes.md") if info == "sh"]
    assert len(steps) >= 4
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    command = Path(sys.executable).with_name("topspin")
    path = f"{command.parent}:{os.environ['PATH']}"
    for step in steps:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step.replace("MODEL_DIR", str(model))],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{step}\n{done.stdout}{done.stderr}"
    secrets = tmp_path / "deployment" / "secrets"
    listed = yaml.safe_load((secrets / "kustomization.yaml").read_text())
    for each in listed["secretGenerator"]:
        for name in each["files"]:
            assert (secrets / name).stat().st_size > 0
    (secrets / "api-keys").chmod(0o440)
    key = (secrets / "metrics-key").read_text()
    assert {each.name for each in read_key_file(secrets / "api-keys").values()} == {"monitor", "me"}
    assert ApiKeys(None, secrets / "api-keys").tenant_of(key.encode()) == Tenant(name="monitor")
    if KUSTOMIZE is not None:
        (patches,) = (text for info, text in blocks(ROOT / "docs/kubernetes.md") if info == "yaml")
        own = tmp_path / "own"
        own.mkdir()
        (own / "kustomization.yaml").write_text(patches)
        command = [KUSTOMIZE, "build", str(own)]
        built = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert built.count("gpu: l40s") == 2  # two groups of expert nodes
        assert "--otlp-traces-endpoint" in built
        assert "port: 4318" in built


# PyPI's project of our name is somebody else's: pip gets Topspin from its folder only.
STRANGER = re.compile(
    r"\b(?:pipx?|uvx?|poetry|pdm)\s+(?:install|add|run|tool\s+install)\b[^\n|&;.]*?"
    r"[\s'\"]topspin(?=[\s'\"=<>~\[`,)]|$)|\btopspin\[[a-z]+\]",
    re.IGNORECASE | re.MULTILINE,
)


def test_no_text_has_pip_install_the_strangers_package() -> None:
    for told in ("pip install topspin", "pip install -U 'topspin[x]'", "`uv add topspin`"):
        assert STRANGER.search(told), told
    folders = [each for each in ROOT.iterdir() if each.is_dir() and each.name[0] != "."]
    texts = [*ROOT.glob("*"), *(ROOT / ".ci").glob("*")]
    texts += [each for folder in folders for each in folder.rglob("*")]
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".txt", ""}
    told = [
        f"{each.relative_to(ROOT)}: {found[0]}"
        for each in texts
        if each.is_file() and each.suffix in kinds and each != Path(__file__)
        # The literals of a text that goes over two lines are joined.
        for found in [STRANGER.search(re.sub(r'"\n *f?"', "", each.read_text(errors="ignore")))]
        if found
    ]
    assert told == []
