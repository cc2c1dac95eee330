"""The chat page: a question that is sent, streamed and shown, stopped, and asked with the keyboard alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from edge_process import wait
from person import Go, ask, box, error, ranks, state, turns
from playwright.sync_api import expect
from stage import ANSWER, QUESTION, Stage, ids, stage


@pytest.fixture(scope="module")
def cluster() -> Iterator[Stage]:
    with stage() as made:
        made.rank("prefill")
        made.rank("decode")
        made.serve()
        yield made


@pytest.fixture(autouse=True)
def every_token_may_come(cluster: Stage) -> Iterator[None]:
    cluster.gate.open()
    yield
    cluster.gate.open()


def test_a_question_is_sent_streamed_and_shown(cluster: Stage, visit: Go) -> None:
    seen = visit(cluster.url)
    page = seen.page
    expect(state(page)).to_have_text("Ranks: 1 prefill, 1 decode")
    expect(box(page)).to_be_focused()
    expect(page.get_by_label("Model")).to_be_hidden()  # there is one
    seen.look("empty")
    cluster.gate.close()
    ask(page, QUESTION)
    expect(turns(page)).to_have_text([QUESTION, ""])
    expect(box(page)).to_have_value("")
    cluster.gate.release(28)
    expect(turns(page).last).to_have_text("Prefill computes a whole pro")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(ranks(page)).to_contain_text("decode/0 ready, 1 running")
    seen.look("streams")
    cluster.gate.open()
    expect(turns(page).last).to_have_text(ANSWER)
    times, tokens = r"first token after \d+ ms, then [\d.]+ ms a token", f"33 tokens in, {len(ids(ANSWER))} out"
    facts = re.compile(f"^prefill/0 → decode/0 · {times} · {tokens}$")
    expect(page.locator(".facts")).to_have_text(facts)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    seen.look("answered")
    ask(page, "And?")
    before = f"{QUESTION}\n{ANSWER}\nAnd?"
    expect(page.locator(".facts")).to_have_text([facts, re.compile(f"· {len(ids(before))} tokens in, ")])


def test_a_stream_is_stopped_by_button_and_by_escape(cluster: Stage, visit: Go) -> None:
    """What came stays, the cluster has it no more, and the next question is answered."""
    page = (seen := visit(cluster.url)).page
    for stop in (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")):
        page.get_by_role("button", name="New chat").click()
        cluster.gate.close()
        ask(page, QUESTION)
        cluster.gate.release(7)
        expect(turns(page).last).to_have_text("Prefill")
        stop()
        expect(page.locator(".facts").first).to_have_text("stopped")
        wait(lambda: cluster.running() == 0)
        cluster.gate.open()
        seen.look("stopped")
        ask(page, "And?")
        expect(turns(page)).to_have_text([QUESTION, "Prefill", "And?", "That is all that I know."])
        expect(error(page)).to_have_count(0)


def test_a_new_chat_forgets_the_old_one_though_it_still_streams(cluster: Stage, visit: Go) -> None:
    page = visit(cluster.url).page
    cluster.gate.close()
    ask(page, QUESTION)
    cluster.gate.release(7)
    expect(turns(page).last).to_have_text("Prefill")
    page.get_by_role("button", name="New chat").click()
    wait(lambda: cluster.running() == 0)
    cluster.gate.open()
    ask(page, "And?")
    expect(page.locator(".facts")).to_have_text(re.compile(r" · 4 tokens in, "))
    expect(turns(page)).to_have_text(["And?", "That is all that I know."])


def test_a_reader_further_up_is_left_there(cluster: Stage, visit: Go) -> None:
    page = visit(cluster.url).page
    talk = page.get_by_role("log")
    ask(page, "more")
    expect(page.locator(".facts")).to_be_visible()
    assert talk.evaluate("talk => talk.scrollHeight > 2 * talk.clientHeight")
    assert talk.evaluate("talk => talk.scrollTop + talk.clientHeight > talk.scrollHeight - 2"), "it followed"
    cluster.gate.close()
    ask(page, QUESTION)
    cluster.gate.release(7)
    expect(turns(page).last).to_have_text("Prefill")
    talk.evaluate("talk => { talk.scrollTop = 0 }")
    cluster.gate.open()
    expect(turns(page).last).to_have_text(ANSWER)
    assert talk.evaluate("talk => talk.scrollTop") == 0


def test_a_link_fills_the_box_and_a_person_sends_it(cluster: Stage, visit: Go) -> None:
    asked: list[str] = []
    page = (seen := visit(cluster.url)).page
    page.on("request", lambda request: asked.append(request.method))
    seen.go(f"{cluster.url}/?q={quote(QUESTION)}")
    expect(ranks(page)).to_contain_text("decode/0 ready")
    expect(box(page)).to_have_value(QUESTION)
    expect(box(page)).to_be_focused()
    seen.look("from a link")
    expect(turns(page)).to_have_count(0)
    assert "POST" not in asked
    page.keyboard.press("Enter")
    expect(turns(page)).to_have_text([QUESTION, ANSWER])
    assert asked.count("POST") == 1


def test_with_the_keyboard_alone(cluster: Stage, visit: Go) -> None:
    page = visit(cluster.url).page
    keys = page.keyboard
    keys.type("two lines")  # the box has the focus from the start
    keys.press("Shift+Enter")
    keys.type(QUESTION)
    cluster.gate.close()
    keys.press("Enter")
    cluster.gate.release(7)
    expect(turns(page)).to_have_text([f"two lines\n{QUESTION}", "Prefill"])
    keys.type("next")
    keys.press("Enter")  # neither stops the stream nor sends
    keys.press("Tab")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    keys.press("Space")
    expect(page.locator(".facts").first).to_have_text("stopped")
    cluster.gate.open()
    expect(box(page)).to_have_value("next")
    keys.press("Shift+Tab")
    keys.press("Enter")
    expect(turns(page)).to_have_count(4)
    reached = [""]
    while reached[-1] != "text":  # once round; the browser's own place between the last and the first is none of them
        keys.press("Tab")
        here = page.locator(":focus-visible")
        reached += here.evaluate_all("found => found.map((it) => it.id || it.textContent.trim())")
        seen = here.evaluate_all("found => found.every((it) => getComputedStyle(it).outlineStyle != 'none')")
        assert seen, f"a person sees that {reached[-1]} has the focus"
    assert [name for name in reached if len(name) < 8] == ["", "send", "API", "metrics", "clear", "talk", "text"]
    keys.press("Shift+Tab")
    keys.press("Shift+Tab")
    keys.press("Enter")
    expect(turns(page)).to_have_count(0)
    expect(box(page)).to_be_focused()
