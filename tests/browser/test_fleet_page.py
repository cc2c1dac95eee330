"""The page of a fleet: what a person sees of each situation, and does there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from fleet_pages import ROOT, PageServer
from fleet_world import HOSTILE
from person import Go
from playwright.sync_api import Locator, Page, expect

WORLD = str(ROOT / "tests" / "support" / "fleet_world.py")
WELL = re.compile(r"^✓ All is well(; .+ \d+% taken, .+ \d+% (busy|taken))?$")
SAID = {
    "well": WELL, "busy": WELL, "slow": "▲ 1 decode rank is slow",
    "full": re.compile(r"^▲ 1 of 4 decode ranks is full, the other 3 are \d+ to \d+% taken$"),
    "dead": "✕ 1 prefill rank is lost",
    "empty": "✕ No rank has joined this controller",
    "old": WELL, "hidden": WELL, "hostile": WELL,
}  # fmt: skip
LOOKED_AT = ("slow", "empty", "hostile")  # and below
Start = Callable[..., PageServer]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[PageServer] = []

    def begin(situation: str, ranks: int, world: str = WORLD, *more: str) -> PageServer:
        made.append(PageServer(world, situation, str(ranks), *more))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def headline(page: Page) -> Locator:
    return page.locator("#verdict .headline")


@pytest.mark.parametrize("situation", SAID)
def test_a_situation_is_said_at_the_top(situation: str, start: Start, visit: Go) -> None:
    seen = visit(start(situation, 8).url)
    expect(headline(seen.page)).to_have_text(SAID[situation])
    expect(seen.page.locator(".tile")).to_have_count(0 if situation == "empty" else 8)
    if situation == "old":
        expect(seen.page.locator("#verdict")).to_contain_text("this controller is older than this page")
    if situation == "hostile":
        expect(seen.page.get_by_text(f"on {HOSTILE}").first).to_be_visible()
    for tile in seen.page.locator("#decode .tile").all():
        if situation != "hidden":
            expect(tile).to_contain_text("(median")
        expect(tile).not_to_contain_text("busy")  # it steps as long as one request runs
    if situation in LOOKED_AT:
        seen.look(f"fleet {situation}")


@pytest.mark.parametrize(
    ("situation", "said", "word"),
    [
        ("slow link", "▲ KV caches come slowly to 1 decode rank", "slow link"),
        ("cold cache", "▲ 1 prefill rank was started again, and its prefix cache is cold", "cold cache"),
    ],
)
def test_a_simulated_fleet_says_it_too(situation: str, said: str, word: str, start: Start, visit: Go) -> None:
    page = (seen := visit(start(situation, 8, str(ROOT / "tests" / "support" / "fleet_sim.py"), "1").url)).page
    expect(headline(page)).to_have_text(said)
    expect(page.locator(".tile.poor")).to_have_count(1)
    expect(page.locator(".tile.poor .state")).to_have_text(word)
    if situation == "cold cache":
        expect(page.locator("#events li.bad", has_text="prefill-")).to_have_text(
            [re.compile(r"✕ rank\s+prefill-\d/0 is lost")]  # that it was started again is no trouble
        )
        expect(page.locator("#marks")).to_have_text(re.compile(r"┃ [\d:]{8} rank: prefill-\d/0 is lost$"))
        expect(page.locator(".tile.poor")).to_contain_text(re.compile(r"cache hits \d+% \(median \d+%\)"))
    else:
        expect(page.locator(".tile.poor")).to_contain_text(re.compile(r"KV fetch \d+ ms \(median [\d.]+ ms\)"))
    seen.look(f"fleet {situation}")


def test_a_queue_in_front_of_512_ranks_and_a_rank_by_keyboard(start: Start, visit: Go) -> None:
    page = (seen := visit(start("queue", 512).url)).page
    expect(headline(page)).to_have_text("◆ Requests wait for room at a decode rank: all 256 decode ranks are full")
    expect(page.locator("#verdict.late li", has_text="and 253 more are full")).to_be_visible()
    expect(page.locator("#queue")).to_contain_text(re.compile("241 requests wait, the first for .* s; no room: decode"))
    first = page.locator("#table tbody tr").first
    expect(first).to_contain_text("F full")  # those that are not well, first
    seen.look("fleet queue 512")
    page.get_by_role("button", name="step time").click()
    expect(first).to_contain_text("ready")
    page.get_by_role("combobox", name="Figure").select_option("step time")
    page.get_by_role("searchbox", name="Find").fill("decode-7/")
    expect(page.locator("#table tbody tr")).to_have_count(8)
    page.locator("#prefill canvas").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#legend")).to_contain_text("prefill-0/1, ready, step time")
    page.keyboard.press("Enter")
    expect(page.locator("#detail h2")).to_have_text("prefill-0/1")
    expect(page.locator("#detail .chart").first).to_contain_text("estimate")
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()


def test_a_sentence_opens_its_rank(start: Start, visit: Go) -> None:
    page = (seen := visit(start("dead", 8).url)).page
    dead = page.locator(".tile.dead")
    expect(dead).to_contain_text(re.compile(r"as last reported at [\d:]{8}, \d+ s ago:"))
    expect(dead).not_to_contain_text("given")
    expect(page.locator("#prefill .sum")).to_contain_text(re.compile(r"\d of 192 running"))  # of those that serve
    page.locator("#verdict li button").click()
    expect(page.locator("#detail.old .what")).to_contain_text("What follows is as it last reported, at ")
    expect(page.locator("#detail .what")).to_contain_text("its lease of 4 s has ended")
    expect(page.locator("#detail .chart path.k0").first).to_be_attached()
    seen.look("fleet a dead rank")
    page.get_by_role("button", name="Close", exact=True).click()
    expect(page.locator("#detail")).to_be_hidden()


def request_of(page: Page) -> Locator:
    return page.get_by_role("region", name="One request")


def test_a_request_is_opened_from_a_list_with_its_attempts_and_why(start: Start, visit: Go) -> None:
    page = (seen := visit(start("queue", 8).url)).page
    listed = page.locator("#listed tbody tr")
    expect(listed).to_have_count(20)
    expect(listed.first).to_contain_text(re.compile("req-00000064.*▲ late"))  # where requests wait, these are first
    page.get_by_role("button", name="Running longest").click()
    expect(listed.first).to_contain_text("prefill-0/0 → decode-0/0")
    page.get_by_role("button", name="Slowest to the first token").click()
    expect(listed.first).to_contain_text(re.compile(r"req-000000c8.*2 s ▲ late"))
    page.get_by_role("button", name="req-000000c8").click()
    expect(request_of(page).get_by_role("heading", level=2)).to_have_text(
        "req-000000c8: done after 1.311 s, 2 attempts"
    )
    steps = request_of(page).get_by_role("listitem")
    expect(steps.nth(4)).to_have_text(re.compile("✕ leg failed, tried again #1, prefill-0/0: peer_lost"))
    expect(steps.last).to_have_text(re.compile(r"^1.311 s.*controller-0done #2$"))
    widths = steps.locator("i").evaluate_all("bars => bars.map((bar) => bar.getBoundingClientRect().width)")
    long = steps.nth(18).locator("i").bounding_box()
    assert long is not None
    assert long["width"] == max(widths), "the bar of what took longest is the longest"
    expect(request_of(page)).to_contain_text("why this prefill rank, attempt 2")
    expect(request_of(page)).to_contain_text("cache_aware, in tokens at 4 candidates: prefill-1/0 640 (512 cached)")
    seen.look("fleet a request")
    page.get_by_role("button", name="Close", exact=True).click()
    expect(request_of(page)).to_be_hidden()


def test_a_request_is_looked_up_by_keyboard_and_an_unknown_one_is_a_sentence(start: Start, visit: Go) -> None:
    page = (seen := visit(start("well", 8).url)).page
    box = page.get_by_role("searchbox", name="A request")
    box.focus()
    page.keyboard.type("req-")
    page.keyboard.press("Enter")
    expect(request_of(page)).to_contain_text("req-00000000: done")
    request_of(page).get_by_role("button", name="req-00000002").focus()
    page.keyboard.press("Enter")
    expect(request_of(page)).to_contain_text("req-00000002: done")
    request_of(page).get_by_role("button", name="Ask again").focus()
    page.keyboard.press("Escape")
    expect(request_of(page)).to_be_hidden()
    for unknown in ("nobody", "..", "a/b?c#d", "%2e"):
        box.fill(unknown)
        page.keyboard.press("Enter")
        sentence = f"No part knows a request '{unknown}': controller-0 remembers the last 30000 requests, of 612 s."
        expect(request_of(page).locator(".what")).to_have_text(sentence)
    seen.look("fleet unknown request")


@pytest.mark.parametrize(
    ("situation", "said"),
    [
        ("empty", "No request is at a rank."),
        ("old", "This controller is older than this page, and lists no requests; look one up."),
        ("hostile", ""),
    ],
)
def test_lists_that_are_empty_or_unknown_or_hostile(situation: str, said: str, start: Start, visit: Go) -> None:
    page = (seen := visit(start(situation, 8).url)).page
    if said:
        expect(page.locator("#no-requests")).to_have_text(said)
        page.get_by_role("searchbox", name="A request").fill("req-1")
        page.keyboard.press("Enter")
    else:
        page.get_by_role("button", name=f"{HOSTILE}-00000003").click()
        expect(request_of(page)).to_contain_text(f"peer_lost: {HOSTILE}")
        seen.look("fleet hostile request")
    if situation == "old":
        expect(request_of(page).locator(".why")).to_have_text(
            "This controller is older than this page, and keeps no reasons."
        )
        seen.look("fleet old request")


def test_two_pages_of_a_browser_share_a_stream_and_one_that_goes_leaves_it(start: Start, visit: Go) -> None:
    server = start("well", 2)
    seen = visit(server.url)
    seen.allow("^window: ")
    streams: list[str] = []
    context = seen.page.context
    expect(headline(seen.page)).to_have_text(WELL)
    context.on("request", lambda request: streams.append(request.url) if "/stream" in request.url else None)
    other = context.new_page()
    other.goto(server.url)
    expect(headline(other)).to_have_text(WELL)
    expect(other.locator(".tile")).to_have_count(2)
    assert len(streams) == 1, "the first page has begun its stream again, for a snapshot"
    clock = other.locator("#clock").text_content() or ""
    expect(other.locator("#clock")).not_to_have_text(clock)
    seen.page.goto("about:blank")
    clock = other.locator("#clock").text_content() or ""
    expect(other.locator("#clock")).not_to_have_text(clock)
    assert len(streams) == 2
    seen.page.goto(server.url)


def test_a_hidden_page_lets_go_of_its_stream_and_reads_again_when_it_is_seen(start: Start, visit: Go) -> None:
    page = (seen := visit(start("well", 2).url)).page
    expect(headline(page)).to_have_text(WELL)
    turn = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with seen.page.context.expect_event("requestfailed", lambda request: "/fleet/stream" in request.url):
        page.evaluate(turn, True)
    clock = page.locator("#clock").text_content() or ""
    with page.expect_request(re.compile("/fleet/stream")):
        page.evaluate(turn, False)
    expect(page.locator("#clock")).not_to_have_text(clock)


def test_a_wrong_token_and_a_server_that_has_gone_are_said(start: Start, visit: Go) -> None:
    server = start("well", 2)
    wrong = visit(server.url.replace("#token=", "#token=x"))
    wrong.allow("401")
    expect(headline(wrong.page)).to_have_text(re.compile("Open the URL that pdbus top --http has printed"))
    wrong.look("fleet wrong token")
    seen = visit(server.url)
    expect(headline(seen.page)).to_have_text(WELL)
    seen.allow("ERR_|Failed to load")
    assert server.leave() == 0
    expect(headline(seen.page)).to_have_text("✕ The page server does not answer")
    expect(seen.page.locator("#clock")).to_contain_text("as of")
    seen.look("fleet server gone")
