"""`python -m tests.system.rig.pictures URL DIR`: pictures of the page of a running server.

Each view at the widths of a phone, a tablet and a laptop, light and dark; the server must be one
that shows its engine to this host (no keys). README and docs/page.md show some of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.system.rig.browser import Tab, chromium, find_chromium

SIZES = {375: 812, 768: 1024, 1440: 900}
SCHEMES = ("light", "dark")
QUESTION = "Explain in two sentences why the sky is blue, then list three colours of a rainbow."
WORK = "Write a long story about a tennis ball that wanted to see the sea."
IS_IDLE = "document.getElementById('send').textContent === 'Send'"
TIMEOUT_S = 240.0
# Lets layout and transitions come to rest.
REST = "new Promise((resolve) => setTimeout(resolve, 700))"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pictures; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.system.rig.pictures", description=__doc__
    )
    parser.add_argument("url")
    parser.add_argument("directory", type=Path)
    parsed = parser.parse_args(argv)
    command = find_chromium()
    if command is None:
        parser.error("there is no Chromium here: apt-get install chromium")
    parsed.directory.mkdir(parents=True, exist_ok=True)
    asyncio.run(draw(command, parsed.url, parsed.directory))
    return 0


async def draw(command: str, url: str, directory: Path) -> None:
    """Ask for an answer, watch another one, and write a picture of each view, size and scheme."""
    with tempfile.TemporaryDirectory() as profile:
        async with chromium(command, Path(profile)) as browser:
            tab, working = await browser.tab(), await browser.tab()
            await tab.open(url)
            await _ask(tab, QUESTION, temperature=0, max_tokens=160, logprobs=True)
            await tab.until(IS_IDLE, timeout_s=TIMEOUT_S)
            await _pictures(tab, directory, "chat")
            await tab.run("location.hash = '#engine'")
            await working.open(url)
            await _ask(working, WORK, temperature=0.8, max_tokens=400)
            await tab.send("Page.bringToFront")
            steps = "document.querySelector('[data-fact=steps]')"
            await tab.until(f"{steps} && parseFloat({steps}.textContent) > 20", timeout_s=TIMEOUT_S)
            await tab.run("location.hash = '#rally'")
            await tab.until("document.querySelector('.gantt rect')", timeout_s=TIMEOUT_S)
            await tab.until("document.querySelectorAll('.ball').length", timeout_s=TIMEOUT_S)
            await tab.click("#play")
            await _pictures(tab, directory, "rally")
            await tab.run("location.hash = '#engine'")
            await _pictures(tab, directory, "engine")


async def _ask(tab: Tab, text: str, **settings: object) -> None:
    await tab.run(f"localStorage.setItem('topspin.settings', {json.dumps(json.dumps(settings))})")
    await tab.click("#new")
    await tab.run("document.getElementById('prompt').focus()")
    await tab.type(text)
    await tab.key("Enter", code=13)


async def _pictures(tab: Tab, directory: Path, view: str) -> None:
    for width, height in SIZES.items():
        for scheme in SCHEMES:
            await tab.resize(width, height, scheme=scheme)
            await tab.run("document.activeElement.blur()")
            await tab.run(REST)
            await tab.picture(directory / f"{view}-{width}-{scheme}.png")


if __name__ == "__main__":
    raise SystemExit(main())
