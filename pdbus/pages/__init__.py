"""The pages that people open in a browser: the files of this folder, and the headers that each is sent with.

A browser runs and shows on such a page only what this package's files say: no script or style stands in a page or in an
attribute, nothing comes from another site or is sent there, no other site may frame the page, and a text that would
become HTML (a model's output is a stranger's) is an error. A server with a page at a path of its own also serves
`/pages/NAME`, from where pages load their scripts and styles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

PREFIX = "/pages/"  # of the paths of what pages load
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # a page and its script are of one version
)
HTML = b"text/html; charset=utf-8"
_KINDS = {".css": b"text/css; charset=utf-8", ".js": b"text/javascript; charset=utf-8", ".svg": b"image/svg+xml"}


@dataclass(frozen=True, slots=True)
class File:
    """A file as it is sent: its bytes and its content type. HEADERS go with it."""

    body: bytes
    kind: bytes


@cache
def page(name: str) -> File:
    """Return the page `name`, such as `chat` for `chat.html`. Raises FileNotFoundError where there is none."""
    return File(resources.files(__name__).joinpath(f"{name}.html").read_bytes(), HTML)


def asset(path: str) -> File | None:
    """Return the script, style or image that pages load from the URL path `/pages/NAME`; None at any other path but
    `/favicon.ico`, which browsers ask for where they show what is no page."""
    return _assets().get(path)


@cache
def _assets() -> dict[str, File]:
    """Return all of them by path. A path is only looked up here, never made into a file's name."""
    found = {
        PREFIX + file.name: File(file.read_bytes(), kind)
        for file in resources.files(__name__).iterdir()
        for suffix, kind in _KINDS.items()
        if file.name.endswith(suffix)
    }
    return found | {"/favicon.ico": found[f"{PREFIX}icon.svg"]}
