"""`make fuzz-api` leaves out nothing that the packages export, and notices what breaks."""

from __future__ import annotations

import re
import tempfile
from dataclasses import is_dataclass
from inspect import isfunction
from pathlib import Path

import fuzz_api
import pytest

from bus import BusAddress, Resolver
from controller import LoadTable
from controller.policies import RankLoad
from pdbus.client.channel import Channel


def test_everything_that_is_exported_is_driven() -> None:
    driven = [*fuzz_api.PARTS, *fuzz_api.ALONE, *fuzz_api.ELSEWHERE]
    assert len(driven) == len(set(driven))
    assert fuzz_api.exported().keys() - fuzz_api.made().keys() == set(driven)
    for kind in fuzz_api.made().values():  # the rest has no life: settings, records and functions
        assert is_dataclass(kind) or isfunction(kind), kind
    for path in re.findall(r"tests/[\w/]+\.py", " ".join(fuzz_api.ELSEWHERE.values())):
        assert (Path(__file__).parents[2] / path).exists(), path


def test_a_refusal_that_comes_after_a_change_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the load table did: it counted a dispatch of no tokens, and then raised."""

    def broken(self: LoadTable, rank: RankLoad, tokens: int, *, ok: bool = True) -> None:
        rank.outstanding -= 1
        raise TypeError(tokens)

    monkeypatch.setattr(LoadTable, "end", broken)
    with pytest.raises(AssertionError):
        fuzz_api.alone("LoadTable", [("end", (), {"rank": fuzz_api.Seat(0), "tokens": "5"})])


def test_a_setting_that_is_no_setting_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise AttributeError("base")

    monkeypatch.setattr(BusAddress, "__post_init__", broken)
    with pytest.raises(AttributeError):
        fuzz_api.make(BusAddress, ("BusAddress", (), {"base": 5}), [])


@pytest.mark.parametrize("way", [way for way in fuzz_api.WAYS if way != "orders"])
def test_an_error_that_is_not_documented_is_noticed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Resolver, *rooms: object) -> None:
        raise KeyError(rooms)

    monkeypatch.setattr(Resolver, "want", broken)
    with tempfile.TemporaryDirectory(prefix="pd") as folder, pytest.raises((KeyError, AssertionError)):
        fuzz_api.live("Resolver", fuzz_api.Place(folder), way, *[[("want", (5,), {})]] * 2)


def test_an_order_of_starts_and_stops_that_breaks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Resolver) -> None:
        raise AttributeError("loop")

    monkeypatch.setattr(Resolver, "close", broken)
    with tempfile.TemporaryDirectory(prefix="pd") as folder, pytest.raises(AttributeError):
        fuzz_api.live("Resolver", fuzz_api.Place(folder), "orders", [], [], [("close", (), {})])


def test_a_part_that_fails_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Resolver) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Resolver, "_drain", broken)
    plan: fuzz_api.Plan = [("want", (5,), {}), ("wait", (), {"timeout_s": 0.5})]
    with tempfile.TemporaryDirectory(prefix="pd") as folder, pytest.raises((AssertionError, ZeroDivisionError)):
        fuzz_api.live("Resolver", fuzz_api.Place(folder), "serving", plan, [])


def test_a_stream_that_never_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_api, "PATIENCE_S", 0.2)
    monkeypatch.setattr(Channel, "begin", lambda *_: None)
    plan: fuzz_api.Plan = [("generate_tokens", (), {"ids": [1], "leg": "pair", "model": "m"})]
    with tempfile.TemporaryDirectory(prefix="pd") as folder, pytest.raises(AssertionError, match="never returned"):
        fuzz_api.live("Client", fuzz_api.Place(folder), "serving", plan, [])


def test_lives_of_each_part() -> None:
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        ran = fuzz_api.drive(fuzz_api.Place(folder), fuzz_api.seeds_for(0.0, 1))
    assert ran.keys() == {*fuzz_api.PARTS, *fuzz_api.ALONE, "made"}


def test_a_seed_draws_the_same_calls_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[object] = []

    def note(name: str, _: object, way: str, *plans: fuzz_api.Plan) -> None:
        said = [(call, len(args), *((key, type(value)) for key, value in named.items()))
                for plan in plans for call, args, named in plan]  # fmt: skip
        drawn.append((name, way, said))

    monkeypatch.setattr(fuzz_api, "live", note)
    monkeypatch.setattr(fuzz_api, "alone", lambda name, plan: note(name, None, "alone", plan))
    monkeypatch.setattr(fuzz_api, "make", lambda _, call, plan: note("made", None, "made", [call], plan))
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        for _ in range(2):
            fuzz_api.drive(fuzz_api.Place(folder), range(1, 3))
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]
    assert len({str(each) for each in drawn}) > 100, "other seeds, other calls"
