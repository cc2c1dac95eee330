"""The chat page while something goes wrong: a rank is killed, fails or drains, the server goes away, a key is wrong."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from person import Go, ask, box, error, ranks, state, turns
from playwright.sync_api import expect
from stage import ANSWER, QUESTION, Stage, stage

AWAY = r"Failed to load resource: net::ERR_(CONNECTION_REFUSED|CONNECTION_RESET|EMPTY_RESPONSE|SOCKET_NOT_CONNECTED)"
CUT_OFF = r"Failed to load resource: net::ERR_INCOMPLETE_CHUNKED_ENCODING|" + AWAY
REFUSED = r"Failed to load resource: the server responded with a status of 401 \(Unauthorized\)"


@pytest.fixture
def cluster() -> Iterator[Stage]:
    with stage() as made:
        made.rank("prefill")
        yield made


def test_a_rank_is_killed_and_the_chat_goes_on(cluster: Stage, visit: Go) -> None:
    killed = cluster.process("decode", "killed")
    page = (seen := visit(cluster.serve())).page
    ask(page, QUESTION)
    expect(turns(page).last).to_have_text(re.compile("^Prefill comp"))
    expect(ranks(page)).to_contain_text("killed/0")
    cluster.gate.close()
    cluster.rank("decode", "heir")
    expect(state(page)).to_have_text("Ranks: 1 prefill, 2 decode")
    killed.process.send_signal(signal.SIGKILL)
    expect(state(page)).to_have_text("Ranks: 1 prefill, 1 decode, 1 decode lost")
    expect(ranks(page)).to_contain_text("killed/0 lost")
    said = turns(page).last.text_content() or ""
    assert len(said) < len(ANSWER)
    seen.look("a rank was killed")
    cluster.gate.open()
    expect(turns(page)).to_have_text([QUESTION, ANSWER])  # each token once
    expect(error(page)).to_have_count(0)
    expect(page.locator(".facts")).to_have_text(re.compile("prefill/0 → heir/0"))


def test_a_request_that_fails_mid_stream_is_one_sentence(cluster: Stage, visit: Go) -> None:
    runner = cluster.rank("decode")
    page = (seen := visit(cluster.serve())).page
    cluster.gate.close()
    ask(page, QUESTION)
    cluster.gate.release(7)
    expect(turns(page).last).to_have_text("Prefill")
    runner.fails = "the engine is out of memory"
    cluster.gate.release()
    expect(error(page)).to_have_text(re.compile(r"the engine is out of memory"))
    expect(turns(page)).to_have_text([QUESTION, "Prefill"])
    seen.look("failed")
    runner.fails = ""
    cluster.gate.open()
    ask(page, "And?")
    expect(turns(page).last).to_have_text("That is all that I know.")
    expect(error(page)).to_have_count(0)


def test_a_drained_rank_finishes_what_it_has_and_leaves(cluster: Stage, visit: Go) -> None:
    cluster.rank("decode", "leaves")
    page = (seen := visit(cluster.serve())).page
    cluster.gate.close()
    ask(page, QUESTION)
    cluster.gate.release(7)
    expect(turns(page).last).to_have_text("Prefill")
    cluster.rank("decode", "stays")
    drain = [sys.executable, "-P", "-m", "pdbus", "drain", "leaves/0", "--controller", cluster.controller]
    with subprocess.Popen(drain, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as draining:
        expect(ranks(page)).to_contain_text("leaves/0 draining, 1 running")
        expect(state(page)).to_have_text("Ranks: 1 prefill, 1 decode, 1 decode draining")
        seen.look("draining")
        cluster.gate.open()
        expect(turns(page)).to_have_text([QUESTION, ANSWER])
        draining.communicate(timeout=60)
    assert draining.returncode == 0
    expect(ranks(page)).not_to_contain_text("leaves/0")
    expect(state(page)).to_have_text("Ranks: 1 prefill, 1 decode")
    ask(page, "And?")
    expect(page.locator(".facts").last).to_have_text(re.compile("prefill/0 → stays/0"))


def test_the_server_goes_away_and_comes_back(cluster: Stage, visit: Go) -> None:
    """What was said stays; what could not be asked is back in the box."""
    cluster.rank("decode")
    page = (seen := visit(cluster.serve())).page
    seen.allow(AWAY)
    ask(page, QUESTION)
    expect(turns(page)).to_have_text([QUESTION, ANSWER])
    cluster.take_edge_away()
    expect(state(page)).to_have_text("The server does not answer.")
    expect(ranks(page)).not_to_contain_text("decode/0")
    ask(page, "And?")
    expect(error(page)).to_have_text("The server does not answer.")
    expect(turns(page)).to_have_text([QUESTION, ANSWER])
    expect(box(page)).to_have_value("And?")
    seen.look("server away")
    cluster.serve()
    expect(state(page)).to_have_text("Ranks: 1 prefill, 1 decode")
    page.get_by_role("button", name="Send").click()
    expect(turns(page)).to_have_text([QUESTION, ANSWER, "And?", "That is all that I know."])
    expect(error(page)).to_have_count(0)


def test_the_server_goes_away_mid_stream(cluster: Stage, visit: Go) -> None:
    cluster.rank("decode")
    page = (seen := visit(cluster.serve())).page
    seen.allow(CUT_OFF)
    cluster.gate.close()
    ask(page, QUESTION)
    cluster.gate.release(7)
    expect(turns(page).last).to_have_text("Prefill")
    cluster.take_edge_away()
    expect(error(page)).to_have_text("The connection to the server broke off.")
    expect(turns(page)).to_have_text([QUESTION, "Prefill"])
    seen.look("broken off")
    cluster.gate.open()
    cluster.serve()
    expect(state(page)).to_have_text("Ranks: 1 prefill, 1 decode")
    ask(page, "And?")
    expect(turns(page).last).to_have_text("That is all that I know.")


def test_a_wrong_key_is_asked_for_again(cluster: Stage, visit: Go, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "sk-alices-key"\n')
    keys.chmod(0o600)
    cluster.rank("decode")
    page = (seen := visit(cluster.serve("--api-keys", str(keys)))).page
    seen.allow(REFUSED)
    field = page.get_by_label("API key")
    expect(state(page)).to_have_text("The server asks for an API key.")
    seen.look("asks for a key")
    ask(page, QUESTION)
    expect(error(page)).to_have_text("The server asks for an API key.")
    expect(turns(page)).to_have_count(0)
    expect(field).to_be_focused()
    for wrong in ("sk-eves-key", "schlüssel €"):  # the second fits in no header
        page.keyboard.type(wrong)
        page.keyboard.press("Enter")
        expect(state(page)).to_have_text("The server does not know this API key.")
        expect(field).to_be_focused()  # all of it selected: typing replaces it
    seen.look("wrong key")
    page.keyboard.type("sk-alices-key")
    page.keyboard.press("Enter")
    expect(state(page)).to_have_text("Ranks: 1 prefill, 1 decode")
    expect(box(page)).to_be_focused()
    expect(box(page)).to_have_value(QUESTION)
    page.keyboard.press("Enter")
    expect(turns(page)).to_have_text([QUESTION, ANSWER])
    expect(error(page)).to_have_count(0)
    keys.write_text('[bob]\nkey = "sk-bobs-key"\n')  # alice is no longer welcome
    expect(state(page)).to_have_text("The server does not know this API key.")
    ask(page, "And?")
    expect(error(page)).to_have_text("The server does not know this API key.")
    expect(field).to_be_focused()
    page.keyboard.type("sk-bobs-key")
    page.keyboard.press("Enter")
    expect(box(page)).to_be_focused()
    expect(box(page)).to_have_value("And?")
    page.keyboard.press("Enter")
    expect(turns(page).last).to_have_text("That is all that I know.")
