"""`make fuzz-api` leaves out nothing that the packages export, and notices what breaks."""

from __future__ import annotations

import tempfile

import fuzz_api
import pytest

from bus import Resolver
from pdbus.client.channel import Channel


def test_everything_that_is_exported_and_lives_is_driven() -> None:
    assert fuzz_api.exported().keys() == fuzz_api.PARTS.keys() | fuzz_api.ELSEWHERE.keys()


@pytest.mark.parametrize("way", fuzz_api.WAYS)
def test_an_error_that_is_not_documented_is_noticed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Resolver, *rooms: object) -> None:
        raise KeyError(rooms)

    monkeypatch.setattr(Resolver, "want", broken)
    with tempfile.TemporaryDirectory(prefix="pd") as folder, pytest.raises((KeyError, AssertionError)):
        fuzz_api.live("Resolver", fuzz_api.Place(folder), way, *[[("want", (5,), {})]] * 2)


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
    assert ran.keys() == fuzz_api.PARTS.keys()


def test_a_seed_draws_the_same_calls_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[object] = []

    def note(name: str, _: object, way: str, *plans: fuzz_api.Plan) -> None:
        said = [(call, len(args), *((key, type(value)) for key, value in named.items()))
                for plan in plans for call, args, named in plan]  # fmt: skip
        drawn.append((name, way, said))

    monkeypatch.setattr(fuzz_api, "live", note)
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        for _ in range(2):
            fuzz_api.drive(fuzz_api.Place(folder), range(1, 4))
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]
    assert len({str(each) for each in drawn}) > 100, "other seeds, other calls"
