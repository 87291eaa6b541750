"""A headless Chromium, driven by its DevTools protocol.

Owns the process, the connection and what a tab complains of. Knows no page and no test.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
DEADLINE_S = 60.0
_IDLE_S = 0.05


def find_chromium() -> str | None:
    """Return the command, or None: TOPSPIN_CHROMIUM, or what Debian's package installs."""
    named = os.environ.get("TOPSPIN_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One tab, and its own storage. `complaints`: what its console and its policy have said."""

    def __init__(self, browser: _Connection, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the answer to a command of the protocol."""
        return await self._browser.send(method, params, self._session)

    async def open(self, url: str) -> None:
        """Show a page; returns once its document and modules have been run."""
        loaded = self._browser.event("Page.loadEventFired", self._session)
        await self.send("Page.navigate", url=url)
        await loaded

    async def run(self, script: str) -> Any:
        """Return the value of an expression, or what a promise brings; raises for an exception."""
        answer = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    async def until(self, condition: str, *, timeout_s: float = DEADLINE_S) -> Any:
        """Return the value of an expression as soon as it is true."""
        script = f"""new Promise((resolve, reject) => {{
          const late = performance.now() + {timeout_s * 1000};
          const look = () => {{
            let found = false;
            try {{ found = {condition}; }} catch {{ /* what it looks at is not there yet */ }}
            if (found) resolve(found);
            else if (performance.now() > late) reject(new Error(document.body.innerText));
            else setTimeout(look, {_IDLE_S * 1000});
          }};
          look();
        }})"""
        return await self.run(script)

    async def click(self, selector: str) -> None:
        """Click an element, as a script does."""
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def key(self, key: str, *, code: int) -> None:
        """Press a key, as a keyboard does; `code` is the key's number in Windows."""
        for kind in ("rawKeyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    async def type(self, text: str) -> None:
        """Write a text where the focus is."""
        await self.send("Input.insertText", text=text)

    async def resize(
        self, width: int, height: int, *, scheme: str = "light", motion: str = "no-preference"
    ) -> None:
        """Give the tab a size and what its reader prefers; narrow ones are phones."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        preferred = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        features = [{"name": name, "value": value} for name, value in preferred.items()]
        await self.send("Emulation.setEmulatedMedia", features=features)
        await self.run("new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))")

    async def picture(self, path: Path) -> None:
        """Write what the tab shows as a PNG."""
        answer = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))


class _Connection:
    """The connection to the browser: commands, answers and events of all its tabs."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._events: dict[tuple[str, str], asyncio.Future[None]] = {}
        self.tabs: dict[str, Tab] = {}

    async def send(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params or {}}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        async with asyncio.timeout(2 * DEADLINE_S):
            return await answer

    def event(self, method: str, session: str) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events[method, session] = future
        return future

    async def read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._answers.pop(told["id"])
                if "error" in told:
                    answer.set_exception(AssertionError(told["error"]))
                else:
                    answer.set_result(told["result"])
                continue
            session = told.get("sessionId", "")
            if (event := self._events.pop((told["method"], session), None)) is not None:
                event.set_result(None)
            if session in self.tabs and (complaint := _complaint(told["method"], told["params"])):
                self.tabs[session].complaints.append(complaint)


def _complaint(method: str, params: dict[str, Any]) -> str | None:
    if method == "Runtime.exceptionThrown":
        return json.dumps(params["exceptionDetails"])
    if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
        return json.dumps(params["args"])
    if method == "Log.entryAdded":
        entry = params["entry"]
        # An answer of 401, say, which is the page's own matter.
        is_answer = entry["source"] == "network"
        return json.dumps(entry) if entry["level"] == "error" and not is_answer else None
    return None


class Browser:
    """A running Chromium."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    async def tab(self, *, beside: bool = False) -> Tab:
        """Return a new tab; with `beside` it shares the storage of others that do."""
        target: dict[str, Any] = {"url": "about:blank"}
        if not beside:
            context = await self._connection.send("Target.createBrowserContext")
            target["browserContextId"] = context["browserContextId"]
        made = await self._connection.send("Target.createTarget", target)
        attached = await self._connection.send(
            "Target.attachToTarget", {"targetId": made["targetId"], "flatten": True}
        )
        tab = Tab(self._connection, attached["sessionId"])
        self._connection.tabs[attached["sessionId"]] = tab
        for domain in ("Page", "Runtime", "Log"):
            await tab.send(f"{domain}.enable")
        # A tab behind another one would draw nothing.
        await tab.send("Emulation.setFocusEmulationEnabled", enabled=True)
        return tab


@asynccontextmanager
async def chromium(command: str, directory: Path) -> AsyncIterator[Browser]:
    """Run Chromium with its files in `directory`, and connect to it."""
    # Its own sandbox needs a user other than root; it opens only pages of this test.
    sandbox = ("--no-sandbox",) if os.getuid() == 0 else ()
    process = await asyncio.create_subprocess_exec(
        *(command, *FLAGS, *sandbox, f"--user-data-dir={directory}", "about:blank"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        url = await _address(process)
        assert process.stderr is not None
        # What it says later would fill the pipe.
        saying = asyncio.create_task(process.stderr.read())
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(url, max_msg_size=0) as socket,
        ):
            connection = _Connection(socket)
            reading = asyncio.create_task(connection.read())
            yield Browser(connection)
            await connection.send("Browser.close")
            reading.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await saying
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said = b""
    async with asyncio.timeout(DEADLINE_S):
        while line := await process.stderr.readline():
            said += line
            if line.startswith(b"DevTools listening on "):
                return line.split()[-1].decode()
    raise AssertionError(f"Chromium did not start: {said.decode(errors='replace')}")
