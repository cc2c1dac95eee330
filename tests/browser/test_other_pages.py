"""The page of the API, the chat page in front of 512 ranks, and a browser that notices what must not happen."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from edge_process import Serve
from person import Go, ask, ranks, state, turns
from playwright.sync_api import Error, expect
from stage import Stage, stage
from up_process import Up


@pytest.fixture(scope="module")
def cluster() -> Iterator[Stage]:
    with stage() as made:
        made.rank("unified")
        made.serve()
        yield made


def test_the_page_of_the_api(cluster: Stage, visit: Go) -> None:
    page = (seen := visit(f"{cluster.url}/docs")).page
    expect(page.get_by_role("heading", level=1)).to_have_text("pdbus serve")
    expect(page.get_by_text("max_completion_tokens", exact=True)).to_be_visible()
    seen.look("API")
    with page.expect_response(re.compile("openapi.json$")) as asked:
        page.get_by_role("link", name="for programs").click()
    assert asked.value.status == 200


def test_512_ranks_and_a_chat_in_front_of_them(visit: Go) -> None:
    many = ("--prefill", "256", "--decode", "256", "--ranks-per-process", "256", "--model", "sim")
    with (
        tempfile.TemporaryDirectory(prefix="pd") as folder,
        Up(Path(folder), *many) as up,
        Serve(up.controller, "--chat-max-tokens", "32") as edge,
    ):
        page = (seen := visit(edge.url)).page
        expect(state(page)).to_have_text("Ranks: 256 prefill, 256 decode")
        expect(ranks(page).locator(".rank")).to_have_count(512)
        ask(page, "hello")
        expect(page.locator(".facts")).to_have_text(re.compile(r"prefill-0/\d+ → decode-0/\d+ · .* out$"))
        assert turns(page).last.text_content()
        seen.look("512 ranks")
        page.goto("about:blank")  # it asks for the load of ranks until then


@pytest.mark.parametrize(
    ("deed", "noticed"),
    [
        ("console.error('oh')", "^oh"),
        ("console.warn('hm')", "^hm"),
        ("setTimeout(() => { throw new Error('bug') })", "^exception: bug"),
        ("setTimeout(() => alert('hello'))", "^dialog: hello"),
        ("fetch('http://127.0.0.1:9/').catch(() => null)", "Content Security Policy"),
        ("document.body.append(Object.assign(new Image(), {src: '//127.0.0.1:9/x'}))", "Security Policy|^request: "),
        ("document.body.setAttribute('style', 'color: red')", "Content Security Policy"),
        ("document.body.setAttribute('onclick', 'alert(1)')", "TrustedScript"),
        ("document.body.innerHTML = '<p>x'", "TrustedHTML"),
        ("setTimeout('1')", "TrustedScript"),
        ("open('/docs')", "^window: "),
        ("location = 'http://127.0.0.1:9/'", "^request: http://127.0.0.1:9/"),
    ],
)  # fmt: skip
def test_what_must_not_happen_is_noticed(cluster: Stage, visit: Go, deed: str, noticed: str) -> None:
    seen = visit(cluster.url)
    expect(state(seen.page)).to_have_text("Ranks: 1 unified")
    seen.allow(noticed)
    try:
        seen.page.evaluate(f"() => {{ {deed} }}")
    except Error as error:
        assert re.search(noticed, str(error))  # noqa: PT017


@pytest.mark.parametrize(
    ("deed", "complaint"),
    [
        ("document.documentElement.lang = ''", "axe"),
        ("document.querySelector('#state').style.color = '#aaa'", "axe"),
        ("document.querySelector('h1').style.minWidth = '500px'", "380 wide"),
        ("document.querySelector('h1').style.marginLeft = '-30px'", "cut off"),
        ("document.querySelector('#talk').append('W'.repeat(400))", "sideways"),
    ],
)
def test_what_must_not_be_seen_is_noticed(cluster: Stage, visit: Go, deed: str, complaint: str) -> None:
    seen = visit(cluster.url)
    expect(state(seen.page)).to_have_text("Ranks: 1 unified")
    seen.pictures = None  # it is no state of the page
    seen.page.evaluate(f"() => {{ {deed} }}")
    with pytest.raises(AssertionError, match=complaint):
        seen.look("spoilt")
