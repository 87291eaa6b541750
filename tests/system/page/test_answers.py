"""The page before a scripted server: all that an answer may bring, keys, two tabs, bad company."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from server.gateway.http.auth import ApiKeys
from tests.server.gateway.fakes import FakeEngine, loopback, saying
from tests.server.gateway.operations.test_feed import OPERATOR, USER, FedEngine
from tests.system.page.browser import Browser, Tab
from tests.system.page.proxy import PREFIX, proxy
from tests.system.page.visits import ANSWER, IS_IDLE, ask, press, script_answers, visit
from topspin.messages import KvCounts

pytestmark = pytest.mark.timeout(300)
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def event(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call(text: str, function: Mapping[str, str] = {}, **about: Any) -> dict[str, Any]:
    return event(tool_calls=[{"index": 0, **about, "function": {**function, "arguments": text}}])


USAGE: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 9}}
USAGE["usage"]["prompt_tokens_details"] = {"cached_tokens": 32}
USAGE["usage"]["completion_tokens_details"] = {"accepted_prediction_tokens": 4}
CALLS = (
    event(reasoning_content="I do not know it."),
    event(content="**Let me** look:\n\n| a | b |\n|---|---|\n| 1 | `2` |"),
    call('{"city"', {"name": "weather"}, id="call-1"),
    call(': "Oslo"}'),
    event("tool_calls"),
    USAGE,
)


def test_an_answer_shows_all_that_it_brings(runner: asyncio.Runner, browser: Browser) -> None:
    async def test() -> None:
        async with loopback(FakeEngine(), deadline_s=None) as port:
            tab = await browser.tab()
            await visit(tab, f"http://127.0.0.1:{port}/", tools=json.dumps(TOOLS))
            rain = (event(content="It rains."), event("stop"))
            await script_answers(tab, (CALLS, rain, rain))
            await tab.click("#settings")
            for name, value in {"system": "Be brief.", "temperature": "0.5"}.items():
                await tab.run(f"document.getElementById('setting-{name}').value = '{value}'")
            await press(tab, "Save")
            await ask(tab, "Is it dry in Oslo?")
            await tab.until(IS_IDLE)
            assert not await tab.run("document.querySelector('.message.assistant .fold').open")
            thoughts = "document.querySelector('.message.assistant .thoughts').textContent"
            assert await tab.run(thoughts) == "I do not know it."
            body = "document.querySelector('.message.assistant > .body')"
            assert await tab.run(f"{body}.querySelector('strong').textContent") == "Let me"
            assert await tab.run(f"{body}.querySelectorAll('td').length") == 2
            called = await tab.run("document.querySelector('figure.code').textContent")
            assert "calls weather" in called
            assert '"city": "Oslo"' in called
            stats = await tab.run("document.querySelector('.assistant .stats').textContent")
            for each in ("9 tokens", "32 of 40 prompt tokens cached", "2.3 tokens at a time"):
                assert each in stats
            assert "4 of them drafted" in stats
            # The result of the tool goes back with the call that asked for it.
            await tab.run("document.querySelector('.tool-result textarea').value = 'rain'")
            await press(tab, "Send the result")
            await tab.until(f"{IS_IDLE} && {ANSWER} === 'It rains.'")
            first, second = await tab.run("window.bodies")
            assert first["temperature"] == 0.5
            assert first["tools"] == TOOLS
            assert [each["role"] for each in first["messages"]] == ["system", "user"]
            roles = [each["role"] for each in second["messages"]]
            assert roles == ["system", "user", "assistant", "tool"]
            asked, result = second["messages"][2:]
            assert asked["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
            assert (result["tool_call_id"], result["content"]) == ("call-1", "rain")
            # An export has all of it.
            await tab.run("HTMLAnchorElement.prototype.click = () => {}")
            await tab.run("URL.createObjectURL = (blob) => { window.blob = blob; return ''; }")
            await press(tab, "Export as Markdown")
            written = await tab.run("window.blob.text()")
            for each in ("Be brief.", "Is it dry", "I do not know it.", "weather", "It rains."):
                assert each in written
            await press(tab, "Export as JSON")
            kept = json.loads(await tab.run("window.blob.text()"))
            assert [each["role"] for each in kept["messages"]][2:] == ["tool", "assistant"]
            # An edited message is answered anew, and what came after the old one is gone.
            await press(tab, "Edit", within=".message.user")
            await tab.run("document.querySelector('.editing textarea').value = 'And in Bergen?'")
            await press(tab, "Send again")
            await tab.until(f"{IS_IDLE} && window.bodies.length === 3")
            third = (await tab.run("window.bodies"))[2]["messages"]
            assert [each["content"] for each in third] == ["Be brief.", "And in Bergen?"]
            assert await tab.run("document.querySelectorAll('.message').length") == 2
            assert tab.complaints == []

    runner.run(test())


ENGINE = """(async () => {
  const { EngineView } = await import(new URL("page/engine.js", document.baseURI));
  const place = document.createElement("section");
  document.querySelector("main").append(place);
  new EngineView(place).update(%s);
  const panels = [...place.querySelectorAll(".panel")].filter((each) => !each.hidden);
  const told = panels.map((each) => [each.querySelector("h2").textContent, each.textContent]);
  place.remove();
  return Object.fromEntries(told);
})()"""


@pytest.mark.slow
def test_speculation_and_long_contexts_are_shown_where_there_are_some(
    runner: asyncio.Runner, browser: Browser
) -> None:
    """By the scheduler's own names of their counters."""
    fake = FakeEngine()
    plain = replace(fake.stats, num_waiting=2, max_queued_requests=4)
    kv = KvCounts(
        num_selected_rows=7, num_hot_keys=3, num_read_keys=1, recall_sum=1.8, num_recalls=2
    )
    drafts = {"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": (8, 4, 1)}
    busy = replace(plain, kv=kv, **drafts)

    async def test() -> None:
        async with loopback(fake, deadline_s=None) as port:
            tab = await browser.tab()
            await tab.open(f"http://127.0.0.1:{port}/")
            panels = []
            for stats in (plain, busy):
                told = {"stats": msgspec.to_builtins(stats), "state": "ready", "detail": ""}
                told |= {"table_version": 1, "nodes": [], "news": [], "heat": []}
                link = {"transport": "shm", "payload": "bf16", "latency_us": 0, "gbps": None}
                told["link"] = link
                told["history"] = [{"at": 0, "stats": told["stats"]}]
                panels.append(await tab.run(ENGINE % json.dumps(told)))
            assert {"Speculation", "Long contexts"} == panels[1].keys() - panels[0].keys()
            assert "2 of 4" in panels[0]["Now"]
            for each in ("One token or more80 %", "3 tokens or more10 %", "2.30", "43 %"):
                assert each in panels[1]["Speculation"]
            for each in ("7", "90 %", "75 %"):
                assert each in panels[1]["Long contexts"]
            assert tab.complaints == []

    runner.run(test())


def test_complaints_of_a_tab_are_noticed(runner: asyncio.Runner, browser: Browser) -> None:
    """What the other tests rely on: an error and a breach of the policy are complaints."""

    async def test() -> None:
        async with loopback(FakeEngine(), deadline_s=None) as port:
            tab = await browser.tab()
            await tab.open(f"http://127.0.0.1:{port}/")
            await tab.run("console.error('told')")
            await tab.run("void (document.createElement('img').src = 'https://a.test/x.png')")
            while len(tab.complaints) < 2:
                await tab.run("0")
            told = " ".join(tab.complaints)
            assert "told" in told
            assert "Content Security Policy" in told

    runner.run(test())


# What asks for the engine is counted, and asks again without a pause.
HURRY = """(({ fetch, setTimeout }) => {
  window.numFeeds = 0;
  window.setTimeout = (work) => setTimeout(work);
  window.fetch = (path, options) => {
    window.numFeeds += path.startsWith("feed");
    return fetch(path, options);
  };
})({ fetch, setTimeout })"""


async def give(tab: Tab, key: str) -> None:
    """Write a key where the page asks for it."""
    await tab.until("document.getElementById('key-dialog').open")
    await tab.run("document.getElementById('key-field').focus()")
    await tab.type(key)
    await tab.key("Enter", code=13)


def test_a_wrong_key_is_told_and_an_operators_alone_shows_the_engine(
    runner: asyncio.Runner, browser: Browser, tmp_path: Path
) -> None:
    """Behind a proxy, too: whose key it is counts then, and not who passes it on."""
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text(f"us: {OPERATOR} operator=1\nthem: {USER}\n")
    note = "document.querySelector('#engine .notice')"

    async def test() -> None:
        outside: list[str] = []
        fake = FedEngine()
        fake.script = saying("hello")
        shown = {}
        async with (
            loopback(fake, keys=ApiKeys(None, file), root_path=PREFIX, deadline_s=None) as port,
            proxy(f"http://127.0.0.1:{port}", outside) as url,
            httpx.AsyncClient(base_url=url) as client,
        ):
            for key in (USER, OPERATOR):
                tab = await browser.tab()
                await tab.open(url)
                await ask(tab, "hi")
                if key is USER:
                    await give(tab, "sk-wrong-0123456789")
                    await tab.until("!document.getElementById('key-problem').hidden")
                    problem = "document.getElementById('key-problem').textContent"
                    assert "refused" in await tab.run(problem)
                await give(tab, key)
                await tab.until(f"{IS_IDLE} && {ANSWER} === 'hello'")
                kept = "JSON.stringify([localStorage, sessionStorage, document.cookie])"
                assert key not in await tab.run(kept)
                # It is asked for once. Who is not shown the engine does not ask again and again.
                await tab.run(HURRY)
                await tab.run("location.hash = '#engine'")
                await tab.until(f"{note}.hidden || {note}.textContent.includes('operators only')")
                assert not await tab.run("document.getElementById('key-dialog').open")
                for _ in range(3):
                    await tab.run("fetch('health').then((answer) => answer.text())")
                is_asked_again = await tab.run("window.numFeeds > 1")
                nodes = await tab.run("document.querySelectorAll('[data-node]').length")
                # Nor is it told to who asks without the page; a trace is to no proxy's client.
                headers = {"Authorization": f"Bearer {key}"}
                answers = [await client.get(path, headers=headers) for path in ("feed", "trace")]
                shown[key] = (nodes, is_asked_again, *(each.status_code for each in answers))
                assert tab.complaints == []
                await tab.open("about:blank")
        assert shown == {OPERATOR: (1, True, 200, 404), USER: (0, False, 404, 404)}
        assert outside == []

    runner.run(test())


@pytest.mark.slow
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
HOSTILE = Path(__file__).with_name("hostile.js").read_text()
# Each would take for ever if a scan of a text began another one at each of its characters.
LONG = ("*a", "**a", "_a", "~~a", "[", "![", "[a](", "`a", "``a`", "<a", "|a", "http://", "> ")


@pytest.mark.parametrize(
    ("num_texts", "times"), [(500, 2_000), pytest.param(10_000, 20_000, marks=pytest.mark.slow)]
)
def test_no_hostile_message_runs_anything(
    runner: asyncio.Runner, browser: Browser, num_texts: int, times: int
) -> None:
    rng = random.Random(1)
    texts = ["".join(rng.choices(PIECES, k=rng.randint(1, 6))) for _ in range(num_texts)]
    texts += [piece * times for piece in (*LONG, "- ")] + ["> " * 500 + "deep", "  " * 40 + "- x"]

    async def test() -> None:
        async with loopback(FakeEngine(saying("hello")), deadline_s=None) as port:
            tab = await browser.tab()
            await tab.open(f"http://127.0.0.1:{port}/")
            assert await tab.run(f"{HOSTILE}({json.dumps(texts)})") == []
            assert not await tab.run("window.wasHacked")
            assert tab.complaints == []

    runner.run(test())
