"""The pictures of README.md and docs, made from what runs: `pdbus top` over a busy cluster of which a rank was killed,
the demo as it streams, the chat page, a fleet's page and a timeline. `make pictures` writes them to docs/img.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edge_process import Serve
from perfetto import Perfetto
from PIL import Image
from rich.console import Console, Group
from rich.terminal_theme import MONOKAI
from rich.text import Text
from up_process import Up

from bus.endpoints import BusAddress
from bus.errors import BusError
from pdbus.client import Client
from pdbus.demo import PROMPTS
from pdbus.fleet.figures import Sample
from pdbus.fleet.history import History
from pdbus.fleet.source import BrokerStatusClient
from pdbus.launcher import Cluster, ClusterSpec
from pdbus.top.screen import lines_of
from pdbus.top.view import View

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

IMAGES = Path(__file__).parents[2] / "docs" / "img"
WIDTH, HEIGHT = 112, 21
DEMO_WIDTH = 120
WATCHED_S = 24.0  # more than the window that rates are of
KILLED_S = 17.0
WAIT_S = 240.0  # for an answer
QUESTIONS = (PROMPTS[0], "And what of Germany?")
SPEED, PAUSE_S = 2.5, 1.0  # of the demo's recording; no line waits longer for the next
FACES = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Load:
    """Conversations with a common beginning, so many at a time, until told to stop."""

    def __init__(self, controller: str, at_once: int) -> None:
        self._client = Client(controller)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._talk, args=(random.Random(n),)) for n in range(at_once)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _talk(self, chance: random.Random) -> None:
        common = [[3 + (each * 7 + at) % 500 for at in range(1024)] for each in range(6)]
        while not self._over.is_set():
            prompt = chance.choice(common) + [chance.randrange(3, 500) for _ in range(chance.randrange(200, 1500))]
            try:
                self._client.generate_tokens(prompt, max_tokens=chance.randrange(40, 200)).tokens()
            except BusError:
                pass  # what the killed rank had, if it went nowhere else


def top() -> None:
    """`pdbus top`, some seconds after a decode rank was killed and is back."""
    spec = ClusterSpec(
        prefill=4, decode=4, engine="sim", model="sim", prefill_method="cache_aware", decode_method="total_requests",
        node_args=("--kv-tokens", "32768", "--max-running", "16"),
    )  # fmt: skip
    history = History()
    with (
        Cluster(spec) as cluster,
        Client(cluster.controller) as client,
        BrokerStatusClient(BusAddress(cluster.bus), "") as desk,
        Load(cluster.controller, at_once=36),
    ):
        began, killed = time.monotonic(), False
        while (elapsed := time.monotonic() - began) < WATCHED_S:
            history.add(Sample(elapsed, time.time(), client.status(events_from=history.next_event), desk.ask()))
            if elapsed > KILLED_S and not killed:
                killed = True
                cluster.kill("decode-0/2")
                threading.Thread(target=cluster.restart, args=("decode-0/2",)).start()
            time.sleep(0.5)
        lines = lines_of(history, View(), WIDTH, HEIGHT, where="tcp://10.0.0.1:5560")
    _save("top.svg", "pdbus top", Group(*lines), WIDTH)


def demo() -> None:
    """What `make demo` says, each line when it came."""
    env = os.environ | {"COLUMNS": str(DEMO_WIDTH), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-P", "-m", "pdbus", "demo"]
    lines, times, heard = list[str](), list[float](), 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("To ask it over HTTP"):
                process.communicate(timeout=60)
                break
            waited, heard = time.monotonic() - (heard or time.monotonic()), time.monotonic()
            lines.append(line.rstrip())
            times.append((times[-1] if times else PAUSE_S) + min(PAUSE_S, waited / SPEED))
    assert process.returncode == 0
    path = _save("demo.svg", "make demo", Group(*map(_coloured, lines)), DEMO_WIDTH)
    delays = "".join(f'text[clip-path$="line-{at})"]{{animation-delay:{when:.2f}s}}' for at, when in enumerate(times))
    style = f"@keyframes come{{from{{opacity:0}}to{{opacity:1}}}}text[clip-path]{{animation:come .15s both}}{delays}"
    style += "@media(prefers-reduced-motion){text[clip-path]{animation:none}}"
    path.write_text(path.read_text(encoding="utf-8").replace("</style>", f"{style}</style>", 1), encoding="utf-8")


def fleet() -> None:
    """The page of `pdbus top --http`, some seconds after a prefill rank was killed for good."""
    spec = ClusterSpec(
        prefill=4, decode=4, engine="sim", model="sim", prefill_method="cache_aware", decode_method="total_requests",
        node_args=("--kv-tokens", "32768", "--max-running", "32", "--sim-kv-bytes-per-token", "4096"), transport="tcp",
        bus="tcp://127.0.0.1:5950", controller="tcp://127.0.0.1:5960",
    )  # fmt: skip
    with Cluster(spec) as cluster, Load(cluster.controller, at_once=24):
        where = ("--controller", cluster.controller, "--bus", cluster.bus)
        command = [sys.executable, "-P", "-m", "pdbus", "top", "--http", "0", "--ttft-slo-s", "1", *where]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split("url=")[-1].strip()
                time.sleep(WATCHED_S)
                cluster.kill("prefill-0/1")
                with _page(1280, 1010) as page:
                    page.goto(url)
                    page.wait_for_selector("#verdict.bad li button")
                    time.sleep(KILLED_S / 4)  # until charts show it
                    _photograph(page, "fleet.png")
            finally:
                process.terminate()


def chat() -> None:
    """The chat page after an answer of the demo's model, while the next one streams."""
    with (
        tempfile.TemporaryDirectory(prefix="pd") as folder,
        Up(Path(folder)) as up,
        Serve(up.controller, "--chat-max-tokens", "96") as edge,
        _page(1000, 560) as page,
    ):
        page.route("**/chat/completions", _without_chance)
        page.goto(edge.url)
        for question in QUESTIONS:
            page.get_by_label("Message").fill(question)
            page.keyboard.press("Enter")
            if question != QUESTIONS[-1]:
                page.locator(".facts").wait_for()
        page.locator(".turn").last.filter(has_text=re.compile(".{90}", re.DOTALL)).wait_for()
        _photograph(page, "chat.png")


def timeline() -> None:
    """A part of a virtual run in Perfetto, with a KV transfer from a prompt's last chunk to a decode rank."""
    with tempfile.TemporaryDirectory(prefix="pd") as folder, _browser() as browser:
        path = Path(folder) / "out.json.gz"
        command = "replay --methods cache_aware --ranks 1 --decode-ranks 1 --load 0.5 --duration-s 60 --timeline"
        subprocess.run([sys.executable, "-P", "-m", "pdbus", *command.split(), str(path)], check=True, timeout=WAIT_S)
        opened = Perfetto(browser, path, 1280, 880)
        opened.show_an_arrow()
        opened.page.get_by_text("Following Flows").wait_for()
        opened.rest()
        _photograph(opened.page, "timeline.png")


def _without_chance(route: Route) -> None:
    """Ask for the likeliest token each time: the page asks with the model's own settings."""
    route.continue_(post_data=route.request.post_data_json | {"temperature": 0})


@contextmanager
def _browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


@contextmanager
def _page(width: int, height: int) -> Iterator[Page]:
    """A page in Chromium."""
    with _browser() as browser:
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(WAIT_S * 1000)
        yield page


def _photograph(page: Page, name: str) -> None:
    path = IMAGES / name
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(96).save(path, optimize=True)
    print(f"wrote {path} ({path.stat().st_size // 1024} KiB)", file=sys.stderr)


def _coloured(line: str) -> Text:
    text = Text(line)
    text.highlight_regex(r"^ +\[\d\]", "bold cyan")
    text.highlight_regex(r"\b(prefill|decode)-\d/\d\b", "cyan")
    text.highlight_regex(r"\b(yes|ready)\b", "green")
    text.highlight_regex(r"^(Who ran|The load).*", "bold")
    text.highlight_regex(r"^All \d+ answers.*", "bold green")
    text.highlight_regex(r"─+", "dim")
    return text


def _save(name: str, title: str, what: Group, width: int) -> Path:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(what)
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id="terminal")
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.S)  # fetched from elsewhere
    svg = svg.replace("font-family: Fira Code, monospace;", f"font-family: {FACES};")
    path = IMAGES / name
    path.write_text(svg, encoding="utf-8")
    print(f"wrote {path} ({len(svg) // 1024} KiB)", file=sys.stderr)
    return path


if __name__ == "__main__":
    made = {"top": top, "demo": demo, "chat": chat, "fleet": fleet, "timeline": timeline}
    for picture in sys.argv[1:] or made:
        made[picture]()
