"""`python -m tests.system.page.pictures URL DIR`: pictures of the page of a running server.

Each view at the widths of a phone, a tablet and a laptop, light and dark, as far as a window shows
it or (`--whole`) down to its end; the server must be one that shows its engine to this host (no
keys). README and docs/page.md show some of them, of `topspin serve smollm2-moe --expert-nodes 2
--micro-batches 2`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from tests.system.page.browser import Tab, chromium, find_chromium
from tests.system.page.visits import IS_IDLE, ask, visit

SIZES = {375: 812, 768: 1024, 1440: 900}
SCHEMES = ("light", "dark")
QUESTION = "Explain in two sentences why the sky is blue, then list three colours of a rainbow."
WORK = "Write a long story about a tennis ball that wanted to see the sea."
# So many at once: each micro-batch has some.
NUM_STORIES = 4
TIMEOUT_S = 240.0
# Lets layout and transitions come to rest.
REST = "new Promise((resolve) => setTimeout(resolve, 700))"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pictures; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.system.page.pictures", description=__doc__
    )
    parser.add_argument("url")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--whole", action="store_true", help="views down to their ends")
    parsed = parser.parse_args(argv)
    command = find_chromium()
    if command is None:
        parser.error("there is no Chromium here: apt-get install chromium")
    parsed.directory.mkdir(parents=True, exist_ok=True)
    asyncio.run(draw(command, parsed.url, parsed.directory, is_whole=parsed.whole))
    return 0


async def draw(command: str, url: str, directory: Path, *, is_whole: bool) -> None:
    """Ask for an answer, watch others, and write a picture of each view, size and scheme."""
    with tempfile.TemporaryDirectory() as profile:
        async with chromium(command, Path(profile)) as browser:
            tab = await browser.tab()
            await visit(tab, url, temperature=0, max_tokens=160, logprobs=True)
            await ask(tab, QUESTION)
            await tab.until(IS_IDLE, timeout_s=TIMEOUT_S)
            await _pictures(tab, directory, "chat", is_whole=False)
            await tab.click(".message.assistant [aria-pressed]")
            await tab.run("document.querySelectorAll('.token')[4].focus()")
            await _pictures(tab, directory, "tokens", is_whole=False)
            await tab.click("#settings")
            await _pictures(tab, directory, "settings", is_whole=False)
            await tab.run("document.querySelector('dialog[open]').close()")
            await tab.run("location.hash = '#engine'")
            async with _stories(url):
                steps = "document.querySelector('[data-fact=steps]')"
                await tab.until(
                    f"{steps} && parseFloat({steps}.textContent) > 20", timeout_s=TIMEOUT_S
                )
                await tab.run("location.hash = '#rally'")
                await tab.until("document.querySelector('.gantt rect')", timeout_s=TIMEOUT_S)
                await tab.until("document.querySelectorAll('.ball').length > 1")
                await tab.click("#rally [aria-pressed]")
                await tab.until("document.querySelectorAll('.ball').length > 1")
                await tab.click("#play")
                await _pictures(tab, directory, "rally", is_whole=is_whole)
                await tab.run("location.hash = '#engine'")
                await _pictures(tab, directory, "engine", is_whole=is_whole)


@asynccontextmanager
async def _stories(url: str) -> AsyncIterator[None]:
    """Have the engine write stories while the block runs."""

    async def write(session: aiohttp.ClientSession) -> None:
        async with session.get(f"{url}/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": WORK}], "max_tokens": 800}
        while True:
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                await answer.read()

    async with aiohttp.ClientSession() as session:
        writers = [asyncio.create_task(write(session)) for _ in range(NUM_STORIES)]
        yield
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)


async def _pictures(tab: Tab, directory: Path, view: str, *, is_whole: bool) -> None:
    for width, height in SIZES.items():
        for scheme in SCHEMES:
            await tab.resize(width, height, scheme=scheme)
            if is_whole:
                shown = f"document.querySelector('#{view} .panels').scrollHeight"
                await tab.resize(width, 60 + await tab.run(shown), scheme=scheme)
            await tab.run(REST)
            await tab.picture(directory / f"{view}-{width}-{scheme}.png")


if __name__ == "__main__":
    raise SystemExit(main())
