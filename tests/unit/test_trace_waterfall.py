"""The life of a request as it is drawn: one order of time over several clocks, at 80 columns."""

from __future__ import annotations

import io
import json

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console

from bus.wire.messages import PartTrace, Role, TraceEvent, TraceReply
from pdbus.trace.hops import Hop, as_dict, hops_of, seconds
from pdbus.trace.waterfall import waterfall, why

S = 1_000_000
AHEAD = 3600 * S  # of the decode rank's clock


def mark(at_s: float, what: str, leg: Role | None = None, detail: str = "", attempt: int = 1) -> TraceEvent:
    return TraceEvent(1_790_000_000 * S + round(at_s * S), what, attempt, leg, detail)


ANSWER = TraceReply(
    1, "controller-0",
    (
        PartTrace("client", (mark(-0.01, "asked", attempt=0),), 0, -1),
        PartTrace("controller-0", (
            mark(0.0, "received", detail="512 tokens"), mark(0.0, "queued", detail="behind 3"),
            mark(0.5, "dispatched", "prefill", "prefill-0/1"), mark(0.5, "dispatched", "decode", "decode-0/0"),
            mark(1.002, "output_reported"), mark(3.0, "done"),
        )),
        PartTrace("prefill-0/1", (
            mark(0.501, "taken", "prefill"), mark(0.6, "began", "prefill", "256 tokens cached"),
            mark(0.99, "held", "prefill"), mark(1.2, "ended", "prefill", "KV cache fetched"),
        ), 0, 400),
        PartTrace("decode-0/0", tuple(
            TraceEvent(each.at_us + AHEAD, each.what, 1, "decode", each.detail) for each in (
                mark(0.502, "taken"), mark(0.55, "attached"), mark(0.995, "handed"), mark(0.996, "began"),
                mark(1.0, "first_token"), mark(1.1, "fetched"), mark(2.999, "ended", detail="length, 100 tokens"),
            )
        ), AHEAD, 900),
    ),
)  # fmt: skip


def drawn(answer: TraceReply, width: int, rid: str = "r") -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(waterfall(rid, answer, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().split("\n")


def took(what: str, part: str = "") -> float | None:
    (hop,) = [hop for hop in hops_of(ANSWER) if hop.event.what == what and part in hop.part]
    return None if hop.took_s is None else round(hop.took_s, 6)


def test_marks_of_all_parts_are_in_one_order_with_clocks_put_right() -> None:
    hops = hops_of(ANSWER)
    assert [hop.at_s for hop in hops] == sorted(hop.at_s for hop in hops)
    assert hops[-1].at_s == pytest.approx(3.01)
    order = [hop.event.what for hop in hops if hop.part == "decode-0/0"]
    assert order == ["taken", "attached", "handed", "began", "first_token", "fetched", "ended"]


def test_each_line_says_how_long_it_took_from_what_came_before_it_on_its_way() -> None:
    assert took("asked") is None
    assert took("received") == 0.01
    assert took("taken", "prefill") == 0.001
    assert took("taken", "decode") == 0.002, "from its own dispatch, over an hour of difference in clocks"
    assert took("began", "prefill") == 0.099
    assert took("handed") == 0.493, "a client that attaches is no step of the leg's"
    assert took("ended", "decode") == 1.899
    assert took("done") == 0.001
    waits = [hop.took_s for hop in hops_of(ANSWER) if hop.event.what == "dispatched"]
    assert waits == [0.5, 0.5], "in the queue"


def test_a_client_whose_clock_is_ahead_asked_when_it_was_heard() -> None:
    late = TraceReply(1, "c", (PartTrace("client", (mark(5.0, "asked", attempt=0),), 0, -1), ANSWER.parts[1]))
    first = hops_of(late)[0]
    assert (first.part, first.at_s) == ("client", 0.0)
    assert any("clock not known: client" in line for line in drawn(late, 80))


@pytest.mark.parametrize("width", [80, 100, 200])
def test_it_fits_and_says_all(width: int) -> None:
    lines = drawn(ANSWER, width)
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert lines[0].startswith("r: done after 3.010 s")
    assert "controller-0  received, 512 tokens" in text
    assert "decode-0/0    leg over, length, 100 tokens" in text
    assert "decode-0/0 +3600000.0 ms (±0.5)" in " ".join(text.split())
    longest = max(line.count("█") for line in lines)
    (tokens,) = [line for line in lines if "length, 100 tokens" in line]
    assert tokens.count("█") == longest > 5, "what took longest has the longest bar"


def test_attempts_are_told_apart_and_failures_stand_out() -> None:
    events = (
        mark(0.0, "received"), mark(0.1, "dispatched", "unified", "u/0"),
        mark(0.4, "retried", "unified", "u/0: peer_lost: rank u/0 was restarted"),
        mark(0.4, "dispatched", "unified", "u/1", 2), mark(0.9, "failed", None, "poison: two ranks were lost", 2),
    )  # fmt: skip
    answer = TraceReply(1, "c", (PartTrace("c", events),), ("u/0",))
    lines = drawn(answer, 80)
    text = " ".join(" ".join(lines).split())
    assert lines[0].startswith("r: failed after 900 ms, 2 attempts")
    assert "dispatched #2 to u/1" in text
    assert "did not answer, so what it knows is missing: u/0" in text
    hops = {(hop.event.what, hop.event.attempt): hop for hop in hops_of(answer)}
    assert hops["retried", 1].took_s == pytest.approx(0.3)
    assert hops["dispatched", 2].took_s == pytest.approx(0.0)
    assert hops["failed", 2].took_s == pytest.approx(0.5)


def test_words_from_elsewhere_cannot_steer_the_terminal() -> None:
    evil = TraceReply(1, "c", (PartTrace("c", (mark(0.0, "\x1b[2J", detail="[bold]\x1b]0;x\x07"),)),), ("\x1b[1m",))
    text = "\n".join(drawn(evil, 80, "\x1b[5mrid"))
    assert "\x1b" not in text
    assert "[bold]" in text


def test_as_json_everything_has_its_place() -> None:
    said = json.loads(json.dumps(as_dict("r", ANSWER)))
    assert (said["rid"], said["controller"], said["silent"]) == ("r", "controller-0", [])
    assert {"part": "decode-0/0", "offset_us": AHEAD, "rtt_us": 900} in said["clocks"]
    last = said["marks"][-1]
    assert (last["what"], last["part"], last["at_s"], last["took_s"]) == ("done", "controller-0", 3.01, 0.001)
    (ended,) = [each for each in said["marks"] if each["what"] == "ended" and each["leg"] == "decode"]
    assert ended["at_us"] == mark(2.999, "ended").at_us, "by the controller's clock"


def test_one_mark_alone_and_none() -> None:
    assert hops_of(TraceReply(1, "c", ())) == []
    alone = TraceReply(1, "c", (PartTrace("c", (mark(0.0, "received"),)),))
    assert hops_of(alone) == [Hop("c", alone.parts[0].events[0], 0.0, None)]
    assert "still under way" in drawn(alone, 80)[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0 ms"), (0.0999, "99.9 ms"), (0.1, "100 ms"), (0.5, "500 ms"), (1.5, "1.500 s"), (120.0, "120.0 s")],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


def test_reasons_stand_below_by_leg_and_are_no_marks() -> None:
    reasons = (
        mark(0.5, "weighed", "prefill", "total_tokens, in tokens at 2 candidates: p/1 7, p/0 9"),
        mark(0.5, "weighed", "decode", "named by the caller"),
        mark(0.6, "acknowledged", "prefill", "by its next report 8 tokens besides this request"),
    )
    client, controller, *rest = ANSWER.parts
    answer = replace(ANSWER, parts=(client, replace(controller, events=controller.events + reasons), *rest))
    assert drawn(answer, 100) == drawn(ANSWER, 100)
    console = Console(file=io.StringIO(), width=100, highlight=False)
    console.print(why(answer))
    assert isinstance(console.file, io.StringIO)
    assert [" ".join(line.split()) for line in console.file.getvalue().strip().split("\n")] == [
        "why this prefill rank, attempt 1",
        "total_tokens, in tokens at 2 candidates: p/1 7, p/0 9",
        "by its next report 8 tokens besides this request",
        "why this decode rank, attempt 1",
        "named by the caller",
    ]
    assert [each["what"] for each in as_dict("r", answer)["why"]] == ["weighed", "weighed", "acknowledged"]
