"""Writes the page of a replay: one HTML file with its data, Bokeh (the `html` extra), and the script and style of this
folder. Owns the file and what a browser may do with it.

Nothing that a trace or a command line says stands in the file as HTML or as script: all of it is in the packed data.
The policy lets the file's own scripts run, by their hashes, and nothing be loaded or sent. Bokeh makes its styles while
it runs, so styles are free.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib import resources
from pathlib import Path

from bus.errors import ConfigError
from pdbus.explore.figures import Explored, packed
from pdbus.whole_file import WholeFile

BOKEH = 3, 9  # the oldest that was tried
LIBRARY = "bokeh.min.js", "bokeh-api.min.js"
SCRIPTS = "drawing.js", "page.js"
_MARKS = re.compile(r"<!--(policy|style|data|scripts)-->")


class PageFile(WholeFile):
    """The file of a page, before there is anything to write. Raises ConfigError if it cannot be written, if its name is
    not that of an HTML file, and without Bokeh."""

    def __init__(self, path: Path) -> None:
        if path.suffix.lower() not in (".html", ".htm"):
            raise ConfigError(f"--html writes a page: name a file that ends with .html, not {path.name}")
        self._library = _library()
        super().__init__(path)

    def write(self, explored: Explored) -> int:
        """Write the page, and return its size in bytes. Raises ConfigError if that fails."""
        body = page(packed(explored), self._library)
        with self.whole() as out:
            out.write(body)
        return len(body)


def page(data: bytes, library: list[str]) -> bytes:
    """Return the page with this packed data and Bokeh's scripts."""
    own = resources.files(__package__)
    scripts = [_inlined(text) for text in (*library, *(own.joinpath(name).read_text("utf-8") for name in SCRIPTS))]
    made = {
        "policy": policy(scripts),
        "style": resources.files("pdbus.pages").joinpath("base.css").read_text("utf-8")
        + own.joinpath("page.css").read_text("utf-8"),
        "data": b64encode(data).decode(),
        "scripts": "".join(f"<script>{script}</script>\n" for script in scripts),
    }
    return _MARKS.sub(lambda mark: made[mark[1]], own.joinpath("page.html").read_text("utf-8")).encode()


def policy(scripts: list[str]) -> str:
    """Return the Content-Security-Policy of a page with these scripts."""
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _inlined(script: str) -> str:
    """Return a script as it can stand in a page: nothing in it ends it."""
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


@cache
def _library() -> list[str]:
    """Return Bokeh's scripts, as its package has them; nothing of it is imported."""
    found = importlib.util.find_spec("bokeh")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("--html needs Bokeh: pip install bokeh, or leave out --html")
    version = importlib.metadata.version("bokeh")
    if tuple(map(int, version.split(".")[:2])) < BOKEH:
        raise ConfigError(f"--html needs Bokeh {BOKEH[0]}.{BOKEH[1]} or newer, not {version}: pip install -U bokeh")
    folder = Path(found.submodule_search_locations[0]) / "server" / "static" / "js"
    return [folder.joinpath(name).read_text("utf-8") for name in LIBRARY]
