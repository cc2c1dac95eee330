"""The pages in a real browser, as a person uses them (`make test-browser`; `make pictures` keeps each state's picture).

Playwright drives the Chromium that is here (`$CHROMIUM`, else `chromium` on PATH) over the DevTools protocol. It comes
from PyPI with the driver that it needs (Selenium also wants a chromedriver of the browser's own version; a client of
our own would have to know when an element can be clicked, and what a key does). It clicks and types as a person does,
and each of its waits is for a condition. axe-core, which judges whether a page can be used without seeing or without a
mouse, comes in a wheel too, and runs in an isolated world: the page's policy stays on.

Whatever a test does, a visit fails by an error or warning in the console (a report of the policy is one), an exception,
a dialog, another window, or a request to another origin. Each state that a test reaches is looked at in two widths and
both colour schemes: nothing is cut off or scrolls sideways, and axe finds nothing.
"""

from __future__ import annotations

import re
import time
from importlib import resources
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, Request, expect

WAIT_MS = 30_000.0  # of a busy machine; a wait that succeeds ends with its event
WIDTHS = {380: 720, 1600: 900}  # and heights
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
AXE = resources.files("axe_playwright_python").joinpath("axe.min.js")
RULES = "{resultTypes: ['violations']}"

SIDEWAYS = """() => [...document.querySelectorAll('body, body *')].filter((each) => {
    const box = each.getBoundingClientRect();
    if (!box.width || ['INPUT', 'SELECT', 'OPTION', 'TEXTAREA'].includes(each.tagName)) return false;
    const inline = getComputedStyle(each).display == 'inline';
    return box.left < -1 || box.right > innerWidth + 1 || (!inline && each.scrollWidth > each.clientWidth + 1);
}).map((each) => each.outerHTML.slice(0, 200))"""

expect.set_options(timeout=WAIT_MS)


class Visit:
    """One person's browser on one page. `faults` is all that must not happen; `allow` takes what a test provokes."""

    def __init__(self, browser: Browser, url: str, pictures: Path | None) -> None:
        self._context = browser.new_context(viewport={"width": 1100, "height": 700}, color_scheme="light")
        self._context.set_default_timeout(WAIT_MS)
        self._origin = urlsplit(url)[:2]
        self.pictures = pictures
        self._allowed: dict[str, int] = {}
        self._axe = 0
        self.faults: list[str] = []
        self.page: Page = self._context.new_page()
        self.page.on(
            "console", lambda said: self._note(said.type in {"error", "warning"}, f"{said.text} [{_at(said)}]")
        )
        self.page.on("pageerror", lambda error: self._note(True, f"exception: {error}"))
        self.page.on("dialog", lambda dialog: (self._note(True, f"dialog: {dialog.message}"), dialog.dismiss()))
        self._context.on("page", lambda page: self._note(True, f"window: {page.url}"))
        self._context.on("request", self._on_request)
        self.go(url)

    def go(self, url: str) -> None:
        self._axe = 0
        self.page.goto(url)

    def allow(self, pattern: str) -> None:
        """Take faults that match; at least one has to come."""
        self._allowed[pattern] = 0

    def _note(self, bad: bool, what: str) -> None:
        if not bad:
            return
        for pattern in self._allowed:
            if re.search(pattern, what):
                self._allowed[pattern] += 1
                return
        self.faults.append(what)

    def _on_request(self, request: Request) -> None:
        self._note(urlsplit(request.url)[:2] != self._origin, f"request: {request.url}")

    # --- what it looks like -----------------------------------------------------------------------------------------

    def look(self, state: str) -> None:
        """Look at the page as it is now, in each width and colour scheme."""
        size = self.page.viewport_size
        for width, height in WIDTHS.items():
            self.page.set_viewport_size({"width": width, "height": height})
            for scheme in SCHEMES:
                self.page.emulate_media(color_scheme=scheme)
                if self.pictures is not None:
                    self.page.screenshot(path=self.pictures / f"{state.replace(' ', '-')}-{width}-{scheme}.png")
                assert self.page.evaluate(SIDEWAYS) == [], f"{state}: cut off or scrolls sideways, {width} wide"
                assert self._violations() == [], f"{state}: axe, {width} wide, {scheme}"
        self.page.emulate_media(color_scheme="light")
        self.page.set_viewport_size(size)  # type: ignore[arg-type]

    def _violations(self) -> list[Any]:
        cdp = self._context.new_cdp_session(self.page)
        if not self._axe:
            frame = cdp.send("Page.getFrameTree")["frameTree"]["frame"]["id"]
            made = cdp.send("Page.createIsolatedWorld", {"frameId": frame, "worldName": "axe"})
            self._axe = made["executionContextId"]
            cdp.send("Runtime.evaluate", {"expression": AXE.read_text("utf-8"), "contextId": self._axe})
        found = (
            "found.violations.map((each) => [each.id, each.help, each.nodes.map((node) => node.html.slice(0, 200))])"
        )
        script = f"axe.run(document, {RULES}).then((found) => {found})"
        answer = cdp.send(
            "Runtime.evaluate",
            {"expression": script, "contextId": self._axe, "awaitPromise": True, "returnByValue": True},
        )
        cdp.detach()
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]  # type: ignore[no-any-return]

    def close(self) -> None:
        end = time.monotonic() + WAIT_MS / 1000
        self.page.title()  # what it has said until now has come
        while (missed := [each for each, count in self._allowed.items() if not count]) and time.monotonic() < end:
            self._context.cookies()  # events come meanwhile
        self._context.close()
        assert not self.faults, "\n".join(self.faults)
        assert not missed, f"allowed, and never came: {missed}"


def _at(said: Any) -> str:
    return str(said.location.get("url", ""))
