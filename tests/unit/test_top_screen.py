"""The screen of `pdbus top`, whatever its size, and what its keys do."""

from __future__ import annotations

import pytest
from status_world import latencies, rank, sample

from pdbus.fleet.history import History
from pdbus.top.keys import keys_in
from pdbus.top.screen import lines_of
from pdbus.top.table import COLUMNS, fitting
from pdbus.top.view import KEYS, SORTS, View

WHERE = "ipc:///run/pdbus/controller"


def cluster(ranks: int = 3) -> History:
    made = History()
    for at in (0.0, 10.0):
        count = int(at)
        each = [rank("prefill-0", load={"prompt_tokens_total": 100 * count, "cached_tokens_total": 25 * count})]
        each += [
            rank("decode-0", n, state="lost" if n == 1 else "ready", ended_total=count * (n + 1), restarts=int(n == 2),
                 estimate_requests=8 - n % 8, ttft_counts=latencies(*[0.2] * count),
                 tpot_counts=latencies(*[0.03] * count))
            for n in range(ranks)
        ]  # fmt: skip
        made.add(sample(at, *each, done=2 * count, failed_deadline=4, broker={"rooms_alive": 6, "rooms_expired": 1}))
    return made


def shown(history: History, view: View | None = None, width: int = 80, height: int = 24, **more: str) -> list[str]:
    return [line.plain for line in lines_of(history, view or View(), width, height, where=WHERE, **more)]


@pytest.mark.parametrize("page", ["ranks", "rank", "help"])
@pytest.mark.parametrize(("width", "height"), [(20, 5), (60, 15), (80, 24), (100, 30), (140, 50), (250, 80)])
@pytest.mark.parametrize("ranks", [0, 3, 200])
def test_it_fits_whatever_the_size(page: str, width: int, height: int, ranks: int) -> None:
    lines = shown(cluster(ranks), View(page=page, chosen=("decode-0", 2)), width, height)
    assert len(lines) == height
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [80, 140])
def test_it_tells_all_that_an_operator_asks_for(width: int) -> None:
    text = "\n".join(shown(cluster(), width=width))
    for words in ("1 lost", "2/s", "p50 175ms", "p99 30ms", "6 alive", "1 expired", "25%  prompt tokens cached",
                  "deadline 4", "! decode-0/1 has been lost for 5.0s", "decode-0/2", "tok/s", "rst"):  # fmt: skip
        assert words in text, words
    header = next(line for line in shown(cluster(), width=width) if "rank" in line and "state" in line)
    assert {"load", "kv", "req/s", "tok/s", "ttft99", "tpot99", "bad", "rst"} <= set(header.split())


@pytest.mark.parametrize("width", [80, 140])
def test_first_tokens_in_time_are_shown_where_an_slo_counts(width: int) -> None:
    assert not any("in time" in line for line in shown(cluster(), width=width))
    history = History()
    history.add(sample(0.0, rank(), ttft_slo=6, ttft_slo_kept=3, ttft_slo_missed=1, ttft_slo_exempt=2))
    (line,) = (line for line in shown(history, width=width) if "in time" in line)
    assert all(words in line for words in ("3 kept", "1 missed", "2 exempt"))


def test_the_verdict_is_that_of_the_page_and_cut_where_it_is_long() -> None:
    lines = shown(cluster(), width=140)
    assert "! 1 decode rank is lost" not in "\n".join(lines), "one sentence needs no headline"
    assert " ! decode-0/1 has been lost for 5.0s; 2 of 3 decode ranks are ready" in [line.rstrip() for line in lines]
    made = History()
    full = [rank("decode-0", n, load={"kv_tokens": 990}, model="m\x1b") for n in range(5)]
    lost = [rank("decode-1", n, state="lost") for n in range(5)]
    made.add(sample(0.0, rank("prefill-0", load={"step": 9, "busy_us_total": 90}), *full, *lost))
    text = "\n".join(lines := shown(made, width=140, height=40))
    assert " ! 5 decode ranks are lost, and the broker does not answer, and all 5 decode ranks are full" in text
    assert (text.count(" has been lost for 5.0s; "), text.count(" ~ decode-0/")) == (3, 2)
    assert " ! and 2 more do not serve" in text
    assert "..." in text, "eight lines of ten"
    assert "\x1b" not in text


def test_a_rank_in_detail_has_the_median_of_its_kind_and_only_prefill_is_busy() -> None:
    made = History()
    for at in (0.0, 5.0):
        steps = {"step": int(100 * at), "busy_us_total": int(1e6 * at)}
        ranks = [
            rank("prefill-0", load=steps),
            rank("decode-0", load=steps),
            rank("decode-0", 1, state="hung", load=steps),
        ]
        made.add(sample(at, *ranks))
    text = "\n".join(shown(made, View(page="rank", chosen=("decode-0", 0)), height=40))
    assert "steps    500 steps, 10ms each (10ms is the median of its kind)" in text
    assert "busy" not in text
    text = "\n".join(shown(made, View(page="rank", chosen=("prefill-0", 0)), height=40))
    assert "100%, 500 steps, 10ms each" in text
    text = "\n".join(shown(made, View(page="rank", chosen=("decode-0", 1)), height=40))
    assert "what follows is as it last reported, 0.1s ago" in text


def test_every_key_is_listed_and_no_line_of_the_help_is_cut_at_80_columns() -> None:
    lines = shown(cluster(), View(page="help"))
    text = "\n".join(lines)
    for key, meaning in KEYS:
        assert f"{key:<9}{meaning}" in text
    for column in COLUMNS:
        assert any(line.rstrip().endswith(column.meaning) for line in lines), column.name


def test_more_ranks_than_lines_show_the_chosen_one() -> None:
    lines = shown(cluster(200), View(chosen=("decode-0", 150)))
    assert any(line.startswith("▸decode-0/150 ") for line in lines)
    assert any("more ranks" in line for line in lines)


def test_columns_go_by_worth_and_bars_take_what_is_left() -> None:
    for width in range(1, 200):
        columns = fitting(width)
        assert sum(wide + 1 for _, wide in columns) <= width
    assert {column.name for column, _ in fitting(200)} == {column.name for column in COLUMNS}


def test_one_rank_in_detail() -> None:
    text = "\n".join(shown(cluster(), View(page="rank", chosen=("decode-0", 2))))
    for words in (
        "decode-0/2  decode  ready for 5.0s",
        "epoch 1",
        "1 restarts",
        "2+1 of 8",
        "250 of 1.0k tokens",
        "at ipc:///x",
    ):
        assert words in text, words


def test_a_controller_that_is_silent_or_not_there_yet_is_said_so() -> None:
    assert any("waiting for a controller at" in line for line in shown(History()))
    assert shown(cluster(), silent="the controller does not answer")[1].startswith(" the controller does not answer")


def test_words_of_peers_cannot_control_the_terminal() -> None:
    made = History()
    made.add(sample(0.0, rank(model="m\x1b]0;gotcha\x07")))
    text = "\n".join(shown(made, View(page="rank", chosen=("decode-0", 0))))
    assert "\x1b" not in text
    assert "m\\x1b]0;gotcha\\x07" in text


def test_keys_sort_choose_show_and_leave() -> None:
    figures = cluster(4).figures()
    assert figures is not None
    ranks = figures.ranks

    def after(*keys: str) -> View:
        view = View()
        for key in keys:
            view = view.pressed(key, ranks)
        return view

    assert [each.rank.dp_rank for each in after().ordered(ranks)] == [0, 0, 1, 2, 3]
    assert [after(*"s" * n).sort for n in range(len(SORTS) + 1)] == [*SORTS, "rank"]
    assert after("s", "S").sort == "rank"
    by_state = after("s")
    assert by_state.ordered(ranks)[0].rank.state == "lost"
    assert by_state.pressed("r", ranks).ordered(ranks)[-1].rank.state == "lost"
    assert after("down").chosen == ("prefill-0", 0)
    assert after("down", "down", "down", "up", "up", "up").chosen == ("prefill-0", 0)
    assert after("end").chosen == after("down", "page down").chosen == ("decode-0", 3)
    assert (after("enter").page, after("enter").chosen) == ("rank", ("prefill-0", 0))
    assert after("enter", "enter").page == after("enter", "escape").page == after("?", "?").page == "ranks"
    assert after("down", "escape").chosen is None
    assert (after("p").paused, after("p", "p").paused, after("q").over) == (True, False, True)
    assert after("x") == View()
    assert View().pressed("enter", ()) == View().pressed("down", ()) == View()


def test_keys_as_terminals_send_them() -> None:
    assert keys_in(b"\x1b[B\x1bOA\r?q") == ["down", "up", "enter", "?", "q"]
    assert keys_in(b"\x1b") == ["escape"]
    assert keys_in(b"\x1b[5~jk\xff") == ["page up", "down", "up", ""]
