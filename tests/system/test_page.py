"""The page in a real browser: a chat, the rally and the engine of a real server, and bad company.

One Chromium and one `topspin serve` for all. Skipped where there is no Chromium; Debian's package
`chromium` brings it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from app.cli.trace.report import lanes_of, make_report
from server.gateway.http.auth import ApiKeys
from tests.server.gateway.fakes import FakeEngine, loopback, saying
from tests.system.conftest import Tiny
from tests.system.rig.browser import Browser, Tab, chromium, find_chromium
from tests.system.rig.server import Server
from topspin.messages import Trace

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.timeout(300),
]
# Two MoE layers, two hops each: 40 ms a step, so that answers outlast what happens.
LINK_US = 10_000
NUM_TOKENS = 120
OPERATOR, USER = "sk-operator-0123456789", "sk-user-0123456789"
ANSWER = "(document.querySelector('.message.assistant:last-child > .body')?.textContent ?? '')"
IS_IDLE = "document.getElementById('send').textContent === 'Send'"


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def browser(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    running = chromium(CHROMIUM, tmp_path_factory.mktemp("chromium"))
    yield runner.run(running.__aenter__())
    runner.run(running.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def server(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers are the same before and after a loss."""
    directory = tmp_path_factory.mktemp("server")
    flags = ("--expert-nodes", "2", "--micro-batches", "2", "--deterministic")
    settings = {"latency_us": LINK_US}
    with Server(tiny.path, directory, *flags, settings=settings) as server:
        yield server


@pytest.fixture(scope="module")
def question(server: Server) -> tuple[str, str]:
    """Return a question whose answer is long, and the answer."""
    for number in range(50):
        text = f"Serve {number}!"
        body: dict[str, Any] = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0}
        body["messages"] = [{"role": "user", "content": text}]
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "length":
            return text, choice["message"]["content"]
    raise AssertionError("the model ends all its answers early")


async def chat(tab: Tab, url: str, **settings: object) -> None:
    """Show the page with settings for its first conversation."""
    await tab.open(url)
    await tab.run(f"localStorage.setItem('topspin.settings', {json.dumps(json.dumps(settings))})")
    await tab.open(url)


async def ask(tab: Tab, text: str) -> None:
    """Write a message as one does at a keyboard."""
    await tab.run("document.getElementById('prompt').focus()")
    await tab.type(text)
    await tab.key("Enter", code=13)


def test_an_answer_streams_and_stop_stops_the_work(
    runner: asyncio.Runner, browser: Browser, server: Server, question: tuple[str, str]
) -> None:
    async def test() -> None:
        tab = await browser.tab()
        await chat(tab, server.url, temperature=0, max_tokens=NUM_TOKENS, logprobs=True)
        await ask(tab, question[0])
        await tab.until(f"{ANSWER}.length > 3")
        await tab.click("#send")
        await tab.until(IS_IDLE)
        stopped = await tab.run(ANSWER)
        stats = await tab.run("document.querySelector('.message.assistant .stats').textContent")
        assert "stopped by you" in stats
        async with httpx.AsyncClient() as client:
            while (await client.get(f"{server.url}/feed")).json()["stats"]["num_running"]:
                pass
        # Regenerate asks for the same, edit for something else, and both bring their numbers.
        await tab.run(
            "[...document.querySelectorAll('.actions button')]"
            ".find((each) => each.textContent === 'Regenerate').click()"
        )
        await tab.until(IS_IDLE)
        assert (await tab.run(ANSWER)) != stopped
        stats = await tab.run("document.querySelector('.message.assistant .stats').textContent")
        assert f"{NUM_TOKENS} tokens" in stats
        assert "tokens/s" in stats
        assert "prompt tokens cached" in stats
        await tab.click(".message.assistant [aria-pressed]")
        told = await tab.run(
            "document.querySelector('.token').focus(),"
            "document.querySelector('.candidates').textContent"
        )
        assert "%" in told
        tokens = await tab.run("document.querySelectorAll('.token').length")
        assert tokens == NUM_TOKENS
        # It is there again after a reload.
        shown = await tab.run("document.querySelectorAll('.message').length")
        await tab.open(server.url)
        assert shown == 2 == await tab.run("document.querySelectorAll('.message').length")
        assert tab.complaints == []

    runner.run(test())


def test_the_rally_moves_and_its_numbers_are_those_of_the_trace(
    runner: asyncio.Runner, browser: Browser, server: Server, question: tuple[str, str]
) -> None:
    async def test() -> None:
        talking, watching = await browser.tab(), await browser.tab()
        await watching.open(f"{server.url}/#rally")
        await chat(talking, server.url, temperature=0, max_tokens=NUM_TOKENS)
        await ask(talking, question[0])
        step = "document.querySelector('#rally dd').textContent"
        before = await watching.until(f"document.querySelector('.gantt rect.busy') && {step}")
        await watching.until(f"{step} !== '{before}'")
        lanes = "[...document.querySelectorAll('.gantt .lane')].map((each) => each.textContent)"
        assert await watching.run(lanes) == ["attention 0", "expert 0", "expert 1"]
        found = json.loads(
            await watching.run(
                """(async () => {
                  const { sample } = await (await fetch("feed")).json();
                  const stamps = await import(new URL("page/stamps.js", document.baseURI));
                  const step = stamps.stepOf(sample);
                  return JSON.stringify({ sample, step, formula: stamps.formula(step),
                    replayed: stamps.replay(step.graph, step.link ?? 0) });
                })()"""
            )
        )
        trace = msgspec.convert(found["sample"], Trace)
        report = make_report(lanes_of(trace))
        assert report is not None
        step = found["step"]
        near = pytest.approx
        assert report.steps == [step["step"]]
        assert (report.t_a_s, report.t_e_s) == (near(step["attention"]), near(step["experts"]))
        assert report.t_c_s == near(step["link"])
        assert report.step_s == near(step["rally"])
        assert report.formula_s() == near(found["formula"])
        assert report.replay_error == near(found["replayed"] / step["rally"] - 1)
        bubbles = {each.name: each.bubble for each in report.busy}
        assert bubbles == near({lane["name"]: lane["bubble"] for lane in step["lanes"]})
        # A slower link makes steps longer, and the page says by how much.
        await watching.click("#rally button[aria-pressed]")
        await watching.run(
            "(() => { const link = document.getElementById('if-link'); link.value = 3;"
            " link.dispatchEvent(new Event('input')); })()"
        )
        assert "% longer" in await watching.run(
            "document.querySelector('[data-fact=replayed-so]').parentElement"
            ".nextSibling.textContent"
        )
        await talking.click("#send")
        assert talking.complaints == watching.complaints == []

    runner.run(test())


def test_a_killed_node_turns_red_then_green_and_the_answer_goes_on(
    runner: asyncio.Runner, browser: Browser, server: Server, question: tuple[str, str]
) -> None:
    async def test() -> None:
        talking, watching = await browser.tab(), await browser.tab()
        await watching.open(f"{server.url}/#engine")
        await chat(talking, server.url, temperature=0, max_tokens=NUM_TOKENS)
        await ask(talking, question[0])
        await talking.until(f"{ANSWER}.length > 3")
        node = "document.querySelector('[data-node=\"expert 1\"]').dataset.state"
        await watching.until(f"document.querySelector('[data-node]') && {node} === 'serving'")
        server.kill("expert 1")
        await watching.until(f"{node} === 'lost'")
        await watching.until(f"{node} === 'serving'", timeout_s=120)
        assert int(
            await watching.until("document.querySelector('[data-fact=replays]').textContent")
        )
        news = await watching.run("document.querySelector('.news').textContent")
        assert "lost expert 1" in news
        await talking.until(IS_IDLE, timeout_s=120)
        stored = "JSON.parse(localStorage.getItem(Object.keys(localStorage).find("
        stored += "(each) => each.startsWith('topspin.conversation.')))).messages[1].content"
        assert await talking.run(stored) == question[1]
        assert talking.complaints == watching.complaints == []

    runner.run(test())
    server.pids = server.pids_by_role()


def test_a_key_is_asked_for_and_a_wrong_one_is_told(
    runner: asyncio.Runner, browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text(f"us: {OPERATOR} operator=1\nthem: {USER}\n")

    async def give(tab: Tab, key: str) -> None:
        await tab.until("document.getElementById('key-dialog').open")
        await tab.run("document.getElementById('key-field').focus()")
        await tab.type(key)
        await tab.key("Enter", code=13)

    async def test() -> None:
        fake = FakeEngine(saying("hello"))
        async with loopback(fake, deadline_s=None, keys=ApiKeys(None, file)) as port:
            tab = await browser.tab()
            await tab.open(f"http://127.0.0.1:{port}/")
            await ask(tab, "hi")
            await give(tab, "sk-wrong-0123456789")
            await tab.until("!document.getElementById('key-problem').hidden")
            assert "refused" in await tab.run("document.getElementById('key-problem').textContent")
            await give(tab, USER)
            await tab.until(f"{IS_IDLE} && {ANSWER} === 'hello'")
            kept = await tab.run("JSON.stringify([localStorage, sessionStorage, document.cookie])")
            assert USER not in kept
            # It is asked for once, and is no operator's.
            await tab.run("location.hash = '#engine'")
            await tab.until(
                "document.querySelector('#engine .notice').textContent.includes('operator')"
            )
            assert not await tab.run("document.getElementById('key-dialog').open")
            assert tab.complaints == []

    runner.run(test())


def test_two_tabs_show_the_same_conversations(runner: asyncio.Runner, browser: Browser) -> None:
    async def test() -> None:
        async with loopback(FakeEngine(saying("hello")), deadline_s=None) as port:
            url = f"http://127.0.0.1:{port}/"
            one, two = await browser.tab(beside=True), await browser.tab(beside=True)
            await one.open(url)
            await two.open(url)
            await ask(one, "A question of the first tab")
            titles = "document.getElementById('conversations').textContent"
            await two.until(f"{titles}.includes('first tab')")
            await two.click("#conversations button")
            await two.until(f"{ANSWER} === 'hello'")
            assert one.complaints == two.complaints == []

    runner.run(test())


PIECES = (
    *r"""<script>hacked()</script>
<img src=x onerror=hacked()>
<svg/onload=hacked()>
<iframe srcdoc='<script>parent.hacked()</script>'>
<a href=javascript:hacked()>x</a>
<math href=javascript:hacked()>
<style>*{background:url(x)}</style>
<form action=javascript:hacked()>
<javascript:hacked()>
<https://a.test/?"onmouseover=hacked()>
[x](javascript:hacked())
[x](JaVaScRiPt:hacked())
[x](data:text/html,<script>hacked()</script>)
[x](vbscript:x)
[x](https://a.test/" onclick=hacked())
[x](//a.test)
![x](javascript:hacked())
javascript:hacked()
https://a.test/<script>
`<b onclick=hacked()>`
&lt;script&gt;
| a | b |
|---|---|
| <script>hacked()</script> | [x](javascript:hacked()) |
```html
~~~
</code><script>
**
__
*
`
\
[
](
)""".splitlines(),
    *("\n", "\n\n", " ", "> ", "- ", "  - ", "1. ", "# "),
    "[x](\x01javascript:hacked())",
)
HOSTILE = """(async () => {
  window.hacked = () => { window.wasHacked = true; };
  const { MarkdownView } = await import(new URL("page/markdown.js", document.baseURI));
  const texts = %s;
  const place = document.querySelector(".log");
  const bad = new Set();
  for (const [index, text] of texts.entries()) {
    const whole = document.createElement("div");
    place.append(whole);
    new MarkdownView(whole).update(text);
    for (const each of whole.querySelectorAll("*")) {
      if (!ALLOWED.has(each.localName)) bad.add(each.localName);
      for (const { name, value } of each.attributes) {
        if (name.startsWith("on") || name === "style" || name === "src") bad.add(name);
        if (name === "href" && !/^(https?|mailto):/.test(value)) bad.add(value);
      }
    }
    if (index %% 50 === 0 && text.length < 500) {
      const grown = document.createElement("div");
      const view = new MarkdownView(grown);
      for (let end = 0; end <= text.length; end += 7) view.update(text.slice(0, end));
      view.update(text);
      if (!grown.isEqualNode(whole)) bad.add(`grown: ${text}`);
    }
    whole.remove();
  }
  return [...bad];
})()""".replace(
    "ALLOWED",
    'new Set("p ul ol li a code pre figure figcaption span button blockquote strong em del br hr'
    ' div table thead tbody tr th td h3 h4 h5 h6".split(" "))',
)
# Each would take for ever if a scan of a text began another one at each of its characters.
LONG = (
    "*a",
    "**a",
    "_a",
    "~~a",
    "[",
    "![",
    "[a](",
    "`a",
    "``a`",
    "<a",
    "|a",
    "http://",
    "> ",
    "- ",
)


def test_no_hostile_message_runs_anything(runner: asyncio.Runner, browser: Browser) -> None:
    rng = random.Random(1)
    texts = ["".join(rng.choices(PIECES, k=rng.randint(1, 6))) for _ in range(10_000)]
    texts += [piece * 20_000 for piece in LONG] + ["> " * 500 + "deep", "  " * 40 + "- x"]

    async def test() -> None:
        async with loopback(FakeEngine(saying("hello")), deadline_s=None) as port:
            tab = await browser.tab()
            await tab.open(f"http://127.0.0.1:{port}/")
            assert await tab.run(HOSTILE % json.dumps(texts)) == []
            assert not await tab.run("window.wasHacked")
            assert tab.complaints == []

    runner.run(test())
