"""Names of models, questions, answers and errors that are HTML or script: they are shown as the text that they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from person import Go, ask, box, error, state, turns
from playwright.sync_api import expect
from stage import Stage, script, stage

IMAGE = '<img src=x onerror="document.title=1">'
SCRIPT = '"></textarea></script><script>document.title=1</script>'
FRAME = "<iframe srcdoc='<script>top.document.title=1</script>'></iframe><base href=//evil.example/>"
LINK = '<link rel=stylesheet href=//evil.example/x><style>*{display:none}</style><svg onload="document.title=1">'
DEEDS = {
    "image": IMAGE,
    "script": SCRIPT,
    "frame": FRAME,
    "link": LINK,
    "wide": "W" * 900,
    "bent": "\u202e\u0300\x1b[31mred",
}
MODELS = (IMAGE, SCRIPT + "x" * 60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Stage]:
    with stage() as made:
        for number, model in enumerate(MODELS):
            made.rank("unified", f"u{number}", script({f"say {name}": text for name, text in DEEDS.items()}, model))
        made.serve()
        yield made


@pytest.mark.parametrize("deed", list(DEEDS))
def test_a_question_an_answer_and_a_name_are_text(cluster: Stage, visit: Go, deed: str) -> None:
    text = DEEDS[deed]
    page = (seen := visit(f"{cluster.url}/?q={quote(text)}")).page
    expect(state(page)).to_have_text("Ranks: 2 unified")
    expect(box(page)).to_have_value(text)
    expect(page.get_by_label("Model").locator("option")).to_have_text(sorted(MODELS))
    question = f"{text} say {deed}"
    ask(page, question)
    expect(page.locator(".facts")).to_have_text(re.compile(r"^u[01]/0 · "))
    assert turns(page).all_text_contents() == [question, text]
    seen.look(f"hostile {deed}")
    assert page.title() == "pdbus"
    assert page.locator(":is(.turn, .facts, option) *, img, iframe, base, style").count() == 0


def test_an_error_is_text(cluster: Stage, visit: Go) -> None:
    page = visit(cluster.url).page
    cluster.gate.close()
    ask(page, "say image")
    cluster.gate.release(4)
    expect(turns(page).last).to_have_text("<img")
    for rank in cluster.ranks:
        rank.fails = IMAGE
    cluster.gate.open()
    expect(error(page)).to_contain_text(IMAGE)
    assert page.locator(".error *, img").count() == 0
