"""The page for those who do not see it, use a keyboard or a phone: by checks of ours, and axe's.

axe-core is npm's: the slow test packs it, and is skipped where it cannot be had.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.system.page.browser import Browser, Tab
from tests.system.page.conftest import NUM_TOKENS
from tests.system.page.test_answers import CALLS, event
from tests.system.page.visits import ANSWER, IS_IDLE, ask, script_answers, visit
from tests.system.rig.server import Server

pytestmark = pytest.mark.timeout(300)
AXE = "axe-core@4.14.1"
AXE_TIMEOUT_S = 60.0
LOGPROB = {"token": "It", "logprob": -1.2, "top_logprobs": [{"token": "A", "logprob": -0.4}]}
LIKELY = event(content="It")
LIKELY["choices"][0]["logprobs"] = {"content": [LOGPROB]}
MARKDOWN = "# One\n\n- a [link](https://a.test)\n\n> quoted\n\n```python\nx = 1\n```\n\nIt"
CHECKS = Path(__file__).with_name("checks.js").read_text()


async def looks(browser: Browser, server: Server, question: str) -> AsyncIterator[tuple[str, Tab]]:
    """Yield each view and dialog of the page, on a phone and a laptop, in both schemes."""
    tab = await browser.tab()
    await visit(tab, server.url, temperature=0, logprobs=True)
    answers = ((event(content=MARKDOWN),), (LIKELY,), CALLS)
    await script_answers(tab, answers)
    for number in range(1, len(answers) + 1):
        await ask(tab, question)
        shown = "document.querySelectorAll('.message').length"
        await tab.until(f"{IS_IDLE} && {shown} === {2 * number}")
    await tab.click(".message.assistant [aria-pressed]")
    await tab.run("document.querySelector('.fold:not([hidden])').open = true")
    working = await browser.tab()
    await visit(working, server.url, temperature=0, max_tokens=NUM_TOKENS)
    for view, shown in (
        ("chat", "true"),
        ("chat", "document.getElementById('settings').click()"),
        ("chat", "document.querySelector('.menu').open = true"),
        ("chat", "document.getElementById('key-dialog').showModal()"),
        ("rally", "true"),
        ("engine", "true"),
    ):
        await tab.run(f"location.hash = '#{view}'")
        if view == "rally":
            await ask(working, question)
        if view != "chat":
            await tab.until(f"!document.querySelector('#{view} .panels').hidden")
        await tab.run(f"void ({shown})")
        for width, height in ((375, 812), (1440, 900)):
            for scheme in ("light", "dark"):
                await tab.resize(width, height, scheme=scheme)
                yield f"{view} {shown} {width} {scheme}", tab
        await tab.run("document.querySelector('dialog[open]')?.close()")
        await tab.run("document.querySelector('.menu').open = false")


async def unnamed(tab: Tab) -> list[str]:
    """Return what a screen reader meets and cannot name."""
    tree = await tab.send("Accessibility.getFullAXTree")
    found = []
    for node in tree["nodes"]:
        role = node.get("role", {}).get("value")
        flags = {each["name"]: each["value"].get("value") for each in node.get("properties", ())}
        is_met = flags.get("focusable") or role in ("image", "meter", "dialog", "region", "log")
        if node["ignored"] or not is_met or role in ("RootWebArea", "main"):
            continue
        if not node.get("name", {}).get("value"):
            found.append(str(role))
    return found


@pytest.mark.slow
def test_all_is_named_readable_and_within_reach(
    runner: asyncio.Runner, browser: Browser, server: Server, question: tuple[str, str]
) -> None:
    async def test() -> None:
        found = {}
        async for look, tab in looks(browser, server, question[0]):
            bad = await tab.run(CHECKS) + await unnamed(tab)
            if bad:
                found[look] = bad
            assert tab.complaints == []
        assert found == {}

    runner.run(test())


@pytest.mark.slow
def test_a_keyboard_and_less_motion(
    runner: asyncio.Runner, browser: Browser, server: Server, question: tuple[str, str]
) -> None:
    async def test() -> None:
        tab = await browser.tab()
        await tab.resize(1440, 900, motion="reduce")
        await visit(tab, server.url, temperature=0, max_tokens=NUM_TOKENS)
        await ask(tab, question[0])
        await tab.until("document.querySelector('.message.assistant')")
        await tab.run(
            "document.body.append(Object.assign(document.createElement('p'), "
            "{ className: 'waiting' }))"
        )
        animation = "getComputedStyle(document.querySelector('p.waiting'), '::after').animationName"
        assert await tab.run(animation) == "none"
        # The slow motion waits to be begun.
        await tab.run("location.hash = '#rally'")
        await tab.until("document.getElementById('play').textContent === 'Play'")
        await tab.until("document.querySelector('.court .node')")
        await tab.run("location.hash = '#engine'")
        await tab.until("document.querySelector('#engine canvas').width === 8 * 22")
        await tab.run("document.querySelector('#engine canvas').parentElement.focus()")
        await tab.key("ArrowRight", code=39)
        await tab.key("ArrowDown", code=40)
        told = "document.getElementById('announce').textContent"
        assert (await tab.run(told)).startswith("Layer 1, expert 0")
        await tab.run("location.hash = '#chat'")
        if not await tab.run(IS_IDLE):
            await tab.click("#send")
            await tab.until(IS_IDLE)
        # Escape stops an answer.
        await ask(tab, question[0])
        await tab.until(f"{ANSWER}.length > 3")
        await tab.key("Escape", code=27)
        await tab.until(IS_IDLE)
        stats = "document.querySelector('.message.assistant:last-child .stats').textContent"
        assert "stopped by you" in await tab.run(stats)
        # From the top: past the navigation, or through it.
        await tab.run("document.body.tabIndex = -1, document.body.focus()")
        await tab.key("Tab", code=9)
        active = "document.activeElement.textContent.trim()"
        assert await tab.run(active) == "Skip to the content"
        await tab.key("Tab", code=9)
        assert await tab.run(active) == "Chat"
        assert tab.complaints == []

    runner.run(test())


@pytest.mark.slow
def test_axe_finds_nothing_serious(
    runner: asyncio.Runner,
    browser: Browser,
    server: Server,
    question: tuple[str, str],
    tmp_path: Path,
) -> None:
    source = axe(tmp_path)

    async def test() -> None:
        found: dict[str, list[str]] = {}
        async for look, tab in looks(browser, server, question[0]):
            if not await tab.run("'axe' in window"):
                await tab.run(source)
            for each in await tab.run("axe.run().then(({ violations }) => violations)"):
                nodes = [node["html"][:150] for node in each["nodes"]]
                if each["impact"] in ("serious", "critical"):
                    found[f"{look}: {each['id']}"] = nodes
        assert found == {}

    runner.run(test())


def axe(directory: Path) -> str:
    """Return axe-core's source by npm; skips the test if it does not bring it."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm here, so no axe-core")
    command = [npm, "pack", AXE, "--silent", "--pack-destination", str(directory)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=AXE_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"npm brings no {AXE}: {error}")
    with tarfile.open(next(directory.glob("axe-core-*.tgz"))) as packed:
        file = packed.extractfile("package/axe.min.js")
        assert file is not None
        return file.read().decode()
