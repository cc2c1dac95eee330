"""The pages that people open: all that they load comes from the package, and their headers let nothing else in."""

from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest
from edge_world import World

from pdbus import pages
from pdbus.edge import openapi

KINDS = ("html", "js", "css", "svg")
FILES = sorted(file.name for file in resources.files(pages).iterdir() if file.name.rpartition(".")[2] in KINDS)
HTML = {f"{name}.html": pages.page(name).body for name in (n[:-5] for n in FILES if n.endswith(".html"))}


def get(path: str) -> Any:
    return asyncio.run(World().get(path))


@pytest.mark.parametrize("path", ["/", "/docs", "/pages/chat.js", "/pages/chat.css", "/pages/icon.svg"])
def test_each_comes_with_a_policy_that_lets_nothing_else_in(path: str) -> None:
    """E36."""
    headers = get(path).headers
    assert "content-security-policy" in headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == policy.pop("frame-ancestors") == policy.pop("base-uri") == "'none'"
    assert policy.pop("form-action") == policy.pop("trusted-types") == "'none'", "nothing makes HTML of a text"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy
    assert set(policy.values()) == {"'self'"}
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert headers["cache-control"] == "no-cache", "a page and its script are of one version"


def test_what_is_served_is_the_packages_files_and_no_other() -> None:
    for name in FILES:
        path = pages.PREFIX + name
        if name.endswith(".html"):
            assert pages.asset(path) is None, "a page has a path of its own"
            continue
        answer = get(path)
        assert (answer.status, answer.body) == (200, resources.files(pages).joinpath(name).read_bytes())
        assert answer.headers["content-type"].split(";")[0] in {"text/css", "text/javascript", "image/svg+xml"}
    assert get("/favicon.ico").body == get("/pages/icon.svg").body
    for path in ("", "/", "/pages/", "/pages/../pages/chat.js", "/pages/__init__.py", "/pages//chat.js", "/pages/x.js"):
        assert pages.asset(path) is None
    assert get("/pages/__init__.py").status == get("/pages/../edge/app.py").status == 404
    assert asyncio.run(World().post("/pages/chat.js", {})).status == 405


@pytest.mark.parametrize("name", [*HTML, "docs"])
def test_no_script_or_style_stands_in_a_page(name: str) -> None:
    """And each file that it names is there: the policy would refuse the one, and nothing answers the other."""
    loaded = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            said = dict(attributes)
            assert tag != "style"
            assert not [name for name in said if name == "style" or name.startswith("on")]
            if tag in {"script", "link"}:
                loaded.append(said["src" if tag == "script" else "href"])

    Reader().feed((HTML.get(name) or openapi.page()).decode())
    assert loaded
    assert all(path is not None and pages.asset(path) for path in loaded)


def test_scripts_make_no_html_of_a_text() -> None:
    sinks = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|createContextualFragment|srcdoc"
    )
    for name in FILES:
        if name.endswith(".js"):
            assert not re.search(sinks, resources.files(pages).joinpath(name).read_text()), name
