"""The page of a replay, from a file and without network: figures, the cursor, and the decisions of a request."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from person import Go
from playwright.sync_api import Locator, Page, expect

HOSTILE = "</script><img src=x onerror=alert(1)>$$x$$"
METHODS = "round_robin,total_tokens,cache_aware"
DRAWN = """(host) => {
    const inside = (node) => [...(node.shadowRoot?.children ?? []), ...node.children]
        .flatMap((each) => [each, ...inside(each)]);
    const colours = new Set();
    for (const each of inside(host).filter((each) => each.tagName == 'CANVAS' && each.width && each.height)) {
        const { data } = each.getContext('2d').getImageData(0, 0, each.width, each.height);
        for (let at = 0; at < data.length; at += 16) if (data[at + 3]) colours.add(data.slice(at, at + 3).join());
    }
    return colours.size;
}"""
CURSORS = """Bokeh.documents.flatMap((each) => each.roots()[0].center)
    .filter((each) => each instanceof Bokeh.Span && each.level == 'overlay').map((each) => each.location)"""
POINT = """(place) => {
    const figure = Bokeh.documents.map((each) => each.roots()[0])
        .find((each) => each.renderers[1]?.glyph instanceof Bokeh.Scatter);
    const { x_scale, y_scale } = Bokeh.index.find_one(figure).frame;
    const { data } = figure.renderers[1].data_source;
    return [x_scale.compute(data.x[place]), y_scale.compute(data.y[place])];
}"""


def pdbus(*arguments: str) -> None:
    line = [sys.executable, "-P", "-m", "pdbus", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A replay whose rids are HTML."""
    folder = tmp_path_factory.mktemp("replay")
    rows = [
        {"timestamp": 90 * n, "input_length": 3_000 + 512 * (n % 9), "output_length": 40, "hash_ids": [n % 7, 100 + n],
         "rid": f"{HOSTILE}{n}"}
        for n in range(700)
    ]  # fmt: skip
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pdbus(
        "replay", str(folder / "trace.jsonl"), "--methods", METHODS, "--jobs", "1", "--html", str(folder / "out.html")
    )
    return folder / "out.html"


def opened(visit: Go, file: Path) -> Any:
    seen = visit(file.as_uri())
    seen.page.wait_for_selector(
        "html[data-drawn]", timeout=90_000
    )  # a second, on a machine that has nothing else to do
    return seen


def figures(page: Page) -> Locator:
    return page.locator("figure > div:visible")


def see_all(page: Page) -> None:
    """Go to each figure: it is drawn when it comes into view."""
    for each in figures(page).all():
        each.scroll_into_view_if_needed()
        page.wait_for_function(f"(host) => ({DRAWN})(host) > 4", arg=each.element_handle())


def request(page: Page) -> Locator:
    return page.locator("#request")


def test_distributions_and_heat_maps_are_drawn_in_all_widths_and_schemes(visit: Go, file: Path) -> None:
    page = (seen := opened(visit, file)).page
    expect(page.get_by_role("heading", level=1)).to_have_text("pdbus replay")
    expect(page.locator("#methods tbody tr")).to_have_count(3)
    expect(figures(page)).to_have_count(2 + 3 * 2 + 2)  # distributions, heat maps, hit rate, two methods
    see_all(page)
    expect(page.locator("#loads-note")).to_contain_text("There was one load")
    expect(page.locator("#notes li").first).to_contain_text("The whole decision is kept for the 500 requests")
    seen.look("replay")


def test_the_cursor_moves_in_all_figures_over_time(visit: Go, file: Path) -> None:
    page = opened(visit, file).page
    see_all(page)
    slider = page.get_by_role("slider", name="Time")
    slider.focus()
    slider.press("End")
    most = float(slider.input_value())
    page.wait_for_function(f"(time) => {CURSORS}.every((each) => Math.abs(each - time) < 0.1)", arg=most)
    assert page.evaluate(f"{CURSORS}.length") == 3 * 2 + 1
    slider.press("Home")
    expect(page.locator("#now")).to_have_text("0.0 s")
    expect(page.locator(".run p").first).to_have_text(re.compile(r"^prefill: [\d,]+ tokens, most at prefill/\d"))
    heat = page.locator(".maps figure > div").nth(3)
    heat.scroll_into_view_if_needed()
    box = heat.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 3)
    page.wait_for_function(f"(most) => {CURSORS}.every((each) => each > most / 4 && each < most * 3 / 4)", arg=most)
    assert len(set(page.evaluate(CURSORS))) == 1


def test_a_request_shows_what_each_method_decided(visit: Go, file: Path) -> None:
    page = (seen := opened(visit, file)).page
    page.locator("#list td button").first.click()
    expect(request(page).get_by_role("heading", level=3)).to_have_count(3)
    card = request(page).locator(".card", has=page.get_by_role("heading", name="cache_aware"))
    expect(card.locator("dd").nth(3)).to_have_text(
        re.compile(
            r"^prefill/\d, [\d,]+ tokens by cache_aware; next best prefill/\d, [\d,]+; truly [\d,]+ tokens? queued$"
        )
    )
    expect(card.get_by_role("listitem").first).to_have_text(
        re.compile(
            r"^prefill: cache_aware, in tokens at 8 candidates: prefill/\d [\d,]+ \([\d,]+ cached\), prefill/\d "
        )
    )
    expect(card).to_contain_text("not considered by this method")
    expect(request(page).get_by_role("heading", level=2)).to_contain_text(HOSTILE)
    seen.look("replay request")
    page.get_by_role("combobox", name="Method").select_option("round_robin")
    page.get_by_role("combobox", name="beside").select_option("total_tokens")
    expect(page.locator("#differ")).to_have_text(
        re.compile(r"^Of 700 requests, round_robin had the first token sooner")
    )


def test_a_click_on_a_point_shows_its_request(visit: Go, file: Path) -> None:
    page = opened(visit, file).page
    cloud = page.locator("#cloud")
    cloud.scroll_into_view_if_needed()
    x, y = page.evaluate(POINT, 350)
    box = cloud.bounding_box()
    assert box
    page.mouse.click(box["x"] + x, box["y"] + y)
    expect(request(page).get_by_role("heading", level=2)).to_contain_text(HOSTILE)
    expect(request(page).locator(".card")).to_have_count(3)


def test_rids_are_text_and_the_list_is_reached_by_keys(visit: Go, file: Path) -> None:
    page = opened(visit, file).page
    find = page.get_by_role("searchbox", name="Find")
    find.fill(f"{HOSTILE}42")
    buttons = page.locator("#list td button")
    expect(buttons).to_have_count(11)  # 42, and 420 to 429
    find.press("Tab")
    if page.evaluate("document.activeElement.className") == "scroll":
        page.keyboard.press("Tab")
    name = page.evaluate("document.activeElement.textContent")
    assert name.startswith(f"{HOSTILE}42")
    page.keyboard.press("Enter")
    expect(request(page).get_by_role("heading", level=2)).to_have_text(f"Request {name}")
    expect(request(page)).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(request(page)).to_be_hidden()
    assert page.evaluate("document.activeElement.textContent") == name
    assert page.locator("img").count() == 0
    find.fill("")
    more = page.get_by_role("button", name="Show more")
    more.press("Enter")
    expect(buttons).to_have_count(50)
    expect(buttons.nth(25)).to_be_focused()


def test_several_loads_draw_the_slo_over_them(visit: Go, tmp_path: Path) -> None:
    file = tmp_path / "loads.html"
    loads = ("--concurrency", "2,8,24", "--methods", "round_robin,cache_aware")
    pdbus("replay", "--duration-s", "30", *loads, "--html", str(file))
    page = (seen := opened(visit, file)).page
    expect(page.locator("#loads-x")).to_contain_text("over the number under way")
    assert page.locator("#loads").evaluate(DRAWN) > 4
    seen.look("replay loads")


def test_a_plan(visit: Go, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    pdbus("plan", "--duration-s", "40", "--ranks", "4", "--seeds", "1", "--html", str(file))
    page = (seen := opened(visit, file)).page
    expect(page.get_by_role("heading", level=1)).to_have_text("pdbus plan")
    expect(page.locator(".run")).to_have_count(5)
    expect(page.locator("#loads-x")).to_contain_text("over the number of prefill ranks, of 4 ranks")
    page.locator("#list td button").first.click()
    expect(request(page).locator(".card")).to_have_count(5)
    seen.look("plan")
