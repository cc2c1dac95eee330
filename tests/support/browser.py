"""Headless Chromium over its DevTools protocol: open a page, run expressions in it until one is true."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

WAIT_S = 60.0
CHROMIUM = shutil.which(os.environ.get("CHROMIUM", "chromium"))
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
    "--window-size=1100,700",
)  # fmt: skip


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while (answer := await self._socket.receive_json()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    async def run(self, script: str) -> Any:
        return (await self.call("Runtime.evaluate", expression=script))["result"].get("value")

    async def until(self, script: str, deadline_s: float = WAIT_S) -> Any:
        """What `script` gives, once that is true."""
        async with asyncio.timeout(deadline_s):
            while not (found := await self.run(script)):
                await asyncio.sleep(0.05)
        return found

    async def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def opened(url: str, profile: Path) -> AsyncIterator[Page]:
    assert CHROMIUM
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank", stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while not (line := (await process.stderr.readline()).decode()).startswith("DevTools listening on "):
                pass
        port = line.split(":")[2].partition("/")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                (target,) = [each for each in await answer.json() if each["type"] == "page"]
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                await page.call("Page.navigate", url=url)
                yield page
    finally:
        process.terminate()
        await asyncio.wait_for(process.communicate(), WAIT_S)
