"""The files of the page: who gets them, as what, and that they need nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from server.gateway.http.auth import ApiKeys
from server.gateway.page import files
from server.gateway.page.files import page_files, page_paths
from tests.server.gateway.calls import answer_to

STATIC = Path(files.__file__).with_name("static")
SOURCES = {name: file.content.decode() for name, file in page_files().items()}
MAX_PAGE_BYTES = 150_000
MAX_SCRIPT_LINES = 2_500
KEYS = ApiKeys("sk-0123456789abcdef", None)


class _Html(HTMLParser):
    """The tags of a page, with their attributes, and the text in its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.inline += data.strip()


INDEX = _Html(SOURCES["index.html"])


@pytest.mark.parametrize("path", sorted(page_paths()))
def test_all_files_are_shown_to_everyone_and_kept_by_name(path: str) -> None:
    answer = answer_to(path, keys=KEYS)
    assert answer.status_code == 200
    name = path.rpartition("/")[2] or "index.html"
    kind = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
    assert answer.headers["content-type"].startswith(kind.get(Path(name).suffix, "image/svg+xml"))
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.text == SOURCES[name]
    etag = answer.headers["etag"]
    for known in (etag, f'"other", W/{etag}'):
        again = answer_to(path, keys=KEYS, headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
    assert answer_to(path, keys=KEYS, headers={"If-None-Match": '"other"'}).status_code == 200


def test_a_prefix_without_a_slash_is_sent_on() -> None:
    """Else a browser would ask for files beside the prefix, and not below it."""
    answer = answer_to("/llm", root_path="/llm")
    assert (answer.status_code, answer.headers["location"]) == (307, "llm/")
    assert answer_to("/llm/", root_path="/llm").text == SOURCES["index.html"]
    assert answer_to("/", root_path="/llm").text == SOURCES["index.html"]


def test_no_other_file_is_shown() -> None:
    for name in ("files.py", "..%2ffiles.py", "%2e%2e%2f__init__.py", "none.js", ""):
        assert answer_to(f"/page/{name}").status_code == 404
        assert answer_to(f"/page/{name}", keys=KEYS).status_code == 401


def test_the_policy_lets_nothing_in_but_our_files() -> None:
    answer = answer_to("/")
    policy = answer.headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert {rules[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert rules["require-trusted-types-for"] == "'script'"
    assert rules["trusted-types"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in policy
    assert INDEX.inline == ""
    for _, attributes in INDEX.tags:
        assert not [name for name in attributes if name == "style" or name.startswith("on")]


def test_addresses_are_relative_and_served() -> None:
    """So the page works behind a proxy's prefix."""
    shown = [
        address
        for _, attributes in INDEX.tags
        for name in ("src", "href")
        if (address := attributes.get(name)) and not address.startswith("#")
    ]
    assert len(shown) > 5
    for address in shown:
        assert address == "docs" or f"/{address}" in page_paths()
    for name, source in SOURCES.items():
        if not name.endswith(".js"):
            continue
        for imported in re.findall(r'(?:from|import\()\s*"([^"]+)"', source):
            assert imported.startswith("./")
            assert imported.removeprefix("./") in SOURCES
        for asked in re.findall(r'(?:fetch|call|getJson)\(["`]([^"`]+)["`]', source):
            assert not asked.startswith(("/", "http"))


def test_nothing_turns_text_into_markup_or_comes_from_elsewhere() -> None:
    for name, source in SOURCES.items():
        own = source.replace("http://www.w3.org/2000/svg", "")
        assert not re.findall(r"https?://[\w.]", own), name
        assert not re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", source
        ), name


def test_the_page_is_small() -> None:
    assert {path.name for path in STATIC.iterdir()} == set(SOURCES)
    assert sum(len(file.content) for file in page_files().values()) <= MAX_PAGE_BYTES
    lines = [source.count("\n") for name, source in SOURCES.items() if not name.endswith("html")]
    assert sum(lines) <= MAX_SCRIPT_LINES
