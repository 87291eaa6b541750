"""Visits of the page: its address with settings, a question or a key written at the keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.system.page.browser import Tab

ANSWER = "(document.querySelector('.message.assistant:last-child > .body')?.textContent ?? '')"
IS_IDLE = "document.getElementById('send').textContent === 'Send'"
OPERATOR, USER = "sk-operator-0123456789", "sk-user-0123456789"


async def visit(tab: Tab, url: str, **settings: object) -> None:
    """Show the page with settings for its first conversation."""
    await tab.open(url)
    await tab.run(f"localStorage.setItem('topspin.settings', {json.dumps(json.dumps(settings))})")
    await tab.open(url)


async def ask(tab: Tab, text: str) -> None:
    """Write a message as one does at a keyboard."""
    await tab.run("document.getElementById('prompt').focus()")
    await tab.type(text)
    await tab.key("Enter", code=13)


def key_file(directory: Path) -> Path:
    """Write a file of two keys: an operator's and a usual one."""
    file = directory / "keys"
    file.touch(mode=0o600)
    file.write_text(f"us: {OPERATOR} operator=1\nthem: {USER}\n")
    return file


async def give(tab: Tab, key: str) -> None:
    """Write a key where the page asks for it."""
    await tab.until("document.getElementById('key-dialog').open")
    await tab.run("document.getElementById('key-field').focus()")
    await tab.type(key)
    await tab.key("Enter", code=13)


async def press(tab: Tab, text: str, *, within: str = "body") -> None:
    """Click the last button with a text, in the element of a selector."""
    buttons = f"[...document.querySelectorAll({json.dumps(f'{within} button')})]"
    await tab.run(
        f"{buttons}.filter((each) => each.textContent === {json.dumps(text)}).at(-1).click()"
    )


async def script_answers(tab: Tab, answers: Iterable[Iterable[Mapping[str, object]]]) -> None:
    """Have the page get these events as its next answers; window.bodies has what it sent."""
    texts = [[json.dumps(each) for each in events] + ["[DONE]"] for events in answers]
    bodies = ["".join(f"data: {each}\n\n" for each in events) for events in texts]
    await tab.run(f"window.answers = {json.dumps(bodies)}")
    await tab.run(
        """(() => {
          const real = window.fetch;
          window.bodies = [];
          window.fetch = (path, options) => {
            if (path !== "v1/chat/completions") return real(path, options);
            window.bodies.push(JSON.parse(options.body));
            return Promise.resolve(new Response(window.answers.shift()));
          };
        })()"""
    )
