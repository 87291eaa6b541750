"""Visits of the page: its address with settings, a question asked at the keyboard, the answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from tests.system.page.browser import Tab

ANSWER = "(document.querySelector('.message.assistant:last-child > .body')?.textContent ?? '')"
IS_IDLE = "document.getElementById('send').textContent === 'Send'"


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
