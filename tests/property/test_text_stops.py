"""Stop strings over the borders of pieces: the same as in the whole text, and nothing is shown too early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdbus.text.stops import StopFinder

texts = st.text("ab.", max_size=30)
stops_lists = st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3)


@given(st.lists(texts, max_size=8), stops_lists, st.booleans())
def test_it_is_as_if_the_text_came_at_once(pieces: list[str], stops: list[str], include: bool) -> None:
    finder = StopFinder(stops, include=include)
    shown = ""
    whole = ""
    for piece in pieces:
        whole += piece
        was_found = finder.found is not None
        shown += finder.push(piece)
        hits = [whole.find(stop) for stop in stops if stop in whole]
        if hits and not was_found:
            assert finder.found is not None, "found as soon as it is whole"
            assert whole.find(finder.found) == min(hits)
            break
        assert finder.found is None
        assert whole.startswith(shown)
        assert len(whole) - len(shown) < max(map(len, stops), default=1), "no more is held back than may be needed"
        begun = [n for stop in stops for n in range(1, len(stop)) if whole.endswith(stop[:n])]
        assert len(shown) <= len(whole) - max(begun, default=0), "shown too early"
    shown += finder.finish()
    if finder.found is None:
        assert shown == whole
    else:
        assert shown == whole[: whole.find(finder.found) + len(finder.found) * include]
        assert finder.push("more") == ""


@given(
    st.lists(st.text("ab.", max_size=4), max_size=12),
    st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_a_stop_string_that_ends_early_does_not_count(pieces: list[str], stops: list[str], early: int) -> None:
    finder, shown = StopFinder(stops), ""
    for piece in pieces[:early]:
        shown += finder.push_early(piece)
    for piece in pieces[early:]:
        shown += finder.push(piece)
    shown += finder.finish()
    text, begins = "".join(pieces), len("".join(pieces[:early]))
    ends = [
        (at + len(stop), at)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > begins
    ]
    if not ends:
        assert (finder.found, shown) == (None, text)
    else:
        assert finder.found in stops
        assert text[len(shown) :].startswith(finder.found)
        assert len(shown) + len(finder.found) > begins
