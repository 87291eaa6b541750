"""The page before a real server: a chat behind a proxy's prefix, the rally, a killed node."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
import pytest

from app.cli.trace.report import lanes_of, make_report
from tests.system.page.browser import Browser
from tests.system.page.conftest import NUM_TOKENS
from tests.system.page.proxy import proxy
from tests.system.page.visits import ANSWER, IS_IDLE, ask, press, visit
from tests.system.rig.server import Server
from topspin.messages import Trace

pytestmark = pytest.mark.timeout(300)


def test_an_answer_streams_and_stop_stops_the_work(
    runner: asyncio.Runner, browser: Browser, server: Server, question: tuple[str, str]
) -> None:
    async def test() -> None:
        outside: list[str] = []
        async with proxy(server.url, outside) as url:
            tab = await browser.tab()
            await visit(tab, url, temperature=0, max_tokens=NUM_TOKENS, logprobs=True)
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
            # Regenerate asks for the same again.
            await press(tab, "Regenerate")
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
            await tab.open(url)
            assert shown == 2 == await tab.run("document.querySelectorAll('.message').length")
            await tab.until("document.getElementById('state-text').textContent === 'ready'")
            await tab.open("about:blank")
        assert outside == tab.complaints == []

    runner.run(test())


def test_the_rally_moves_and_its_numbers_are_those_of_the_trace(
    runner: asyncio.Runner, browser: Browser, server: Server, question: tuple[str, str]
) -> None:
    async def test() -> None:
        talking, watching = await browser.tab(), await browser.tab()
        await watching.open(f"{server.url}/#rally")
        await visit(talking, server.url, temperature=0, max_tokens=NUM_TOKENS)
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


@pytest.mark.slow
def test_a_killed_node_turns_red_then_green_and_the_answer_goes_on(
    runner: asyncio.Runner, browser: Browser, server: Server, question: tuple[str, str]
) -> None:
    async def test() -> None:
        talking, watching = await browser.tab(), await browser.tab()
        await watching.open(f"{server.url}/#engine")
        await visit(talking, server.url, temperature=0, max_tokens=NUM_TOKENS)
        await ask(talking, question[0])
        await talking.until(f"{ANSWER}.length > 3")
        wires = "[...document.querySelectorAll('.wires path')].map((each) => each.dataset.state)"
        wires += ".join()"
        node = "document.querySelector('[data-node=\"expert 1\"]').dataset.state"
        await watching.until(f"document.querySelector('[data-node]') && {node} === 'serving'")
        # The plan is drawn: nodes in their hosts, a line to each expert node, the link's name.
        await watching.until(f"{wires} === 'serving,serving'")
        drawn = await watching.run("document.querySelector('.plan').innerText")
        for each in ("localhost", "shared memory", "+ 25 ms one way"):
            assert each in drawn
        server.kill("expert 1")
        await watching.until(f"{node} === 'lost'")
        assert (await watching.run(wires)).endswith(",lost")
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
