"""The soak's judge: it must see every kind of fault it is there to see, or a clean soak proves nothing."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from soak import Ledger, SoakConfig
from soak.run import Verdict
from soak.usage import Usage, usage_of

from bus.errors import ConfigError
from bus.wire.codes import Code
from bus.wire.messages import FinishReason
from pdbus.client.output import Result

EXPECTED = (4, 5, 6)


def result(
    rid: str, ids: tuple[int, ...], finish: FinishReason = "length", code: Code = "ok", attempts: int = 1
) -> Result:
    return Result(rid, finish, ids, attempts, None, None, None, "", 0.0, 1.0, code)


def judged(
    *pieces: tuple[int, ...], end: tuple[FinishReason, Code] = ("length", "ok"), said: tuple[int, ...] | None = None
) -> Ledger:
    ledger = Ledger()
    rid = ledger.begin(EXPECTED, 0.0)
    for piece in pieces:
        ledger.deliver(rid, piece)
    ids = tuple(token for piece in pieces for token in piece) if said is None else said
    assert ledger.deliver(rid, result(rid, ids, *end))
    return ledger


def test_a_right_output_is_completed() -> None:
    ledger = judged((4,), (5, 6))
    assert (ledger.completed, ledger.duplicated, ledger.wrong, ledger.live) == (1, 0, 0, 0)


def test_a_failure_after_a_right_beginning_counts_by_code() -> None:
    ledger = judged((4,), end=("failed", "deadline"))
    assert (ledger.failed, ledger.wrong, ledger.ended) == ({"deadline": 1}, 0, 1)


@pytest.mark.parametrize(
    ("pieces", "end", "said"),
    [
        (((4, 5, 7),), ("length", "ok"), None),  # a wrong token
        (((4, 5),), ("length", "ok"), None),  # too short, and said to be whole
        (((5, 4),), ("failed", "peer_lost"), None),  # out of order, even if it failed then
        (((4, 5, 6),), ("length", "ok"), (4, 5)),  # delivered one thing, and reported another
        ((), ("stop", "ok"), None),  # nothing at all
    ],
)
def test_a_wrong_output_is_seen(
    pieces: tuple[tuple[int, ...], ...], end: tuple[FinishReason, Code], said: tuple[int, ...] | None
) -> None:
    ledger = judged(*pieces, end=end, said=said)
    assert ledger.wrong == 1
    assert ledger.complaints


def test_a_token_that_came_twice_is_seen() -> None:
    assert judged((4, 5), (5, 6)).duplicated == 1


def test_what_comes_after_the_end_is_a_duplicate_however_late() -> None:
    ledger = judged(EXPECTED)
    for _ in range(1000):
        rid = ledger.begin((), 0.0)
        ledger.deliver(rid, result(rid, ()))
    ledger.deliver("s0", result("s0", EXPECTED))
    ledger.deliver("s0", (9,))
    assert ledger.duplicated == 2
    assert ledger.completed == 1001


def test_who_never_ends_is_overdue() -> None:
    ledger = Ledger()
    rids = [ledger.begin(EXPECTED, float(at)) for at in range(3)]
    assert ledger.overdue(10.0, 8.5) == rids[:2]
    assert ledger.live == 3


def test_the_verdict_is_clean_only_when_nothing_is_amiss() -> None:
    def verdict(ledger: Ledger, *, lost: list[str] | None = None, troubles: list[str] | None = None) -> Verdict:
        faults = Counter({"kill broker": 2, "stop decode-0/0": 1})
        return Verdict(SoakConfig(), ledger, faults, troubles or [], lost or [], Usage(100, 5), Usage(110, 5), 60.0)

    clean = verdict(judged(EXPECTED))
    assert clean.clean
    counts = {"accepted", "completed", "failed", "duplicated", "lost", "wrong", "kills"}
    names = counts | {"rss_start_bytes", "rss_end_bytes", "fds_start", "fds_end"}
    assert names <= clean.as_json().keys()
    assert (clean.as_json()["kills"], clean.as_json()["rss_end_bytes"]) == (3, 110)
    assert not verdict(judged((9, 9, 9))).clean
    assert not verdict(judged((4, 5), (5, 6))).clean
    assert not verdict(judged(EXPECTED), lost=["s1"]).clean
    assert not verdict(judged(EXPECTED), troubles=["left by itself"]).clean
    assert verdict(judged((), end=("failed", "poison"))).clean, "a code is an end"


@pytest.mark.parametrize("bad", [{"minutes": 0}, {"kill_every_s": 0}, {"concurrency": 0}, {"max_tokens": 0}])
def test_bad_settings_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        SoakConfig(**bad)  # type: ignore[arg-type]


def test_usage_counts_files_and_memory() -> None:
    before = usage_of([os.getpid()])
    held = [open(os.devnull, "rb") for _ in range(8)]  # noqa: SIM115
    memory = bytearray(random.Random(0).randbytes(1 << 20) * 64)
    after = usage_of([os.getpid(), 2**22 - 1])  # and a process that there is not
    assert after.fds == before.fds + 8
    assert after.rss_bytes > before.rss_bytes + len(memory) // 2
    for file in held:
        file.close()
