"""Token streams: each token once and in order for any reader, none ever waited for."""

from __future__ import annotations

import pytest

from bus.actions import Send
from bus.wire.messages import MAX_TOKENS_PER_MESSAGE, Attach, Detach, Tokens
from nodes.link import streams as module
from nodes.link.streams import ATTACH_WAIT_S, KEEP_FINISHED_S, KEEPALIVE_S, RETRY_S, SendFailure, Streams

A, B = b"reader-a", b"reader-b"


def sent(streams: Streams, now: float = 0.0) -> list[tuple[bytes, int, tuple[int, ...], str, str]]:
    streams.validate()
    out = []
    for send in streams.flush(now):
        message = send.message
        assert isinstance(message, Tokens)
        out.append((send.peer, message.start, message.ids, message.finish, message.code))
    return out


@pytest.fixture
def streams() -> Streams:
    return Streams()


def test_attach_first_or_dispatch_first_gives_the_same(streams: Streams) -> None:
    streams.attach(A, Attach("early", 1), 0.0)
    streams.open("early", 1, 0, 0.0)
    streams.open("late", 1, 0, 0.0)
    assert sent(streams) == [(A, 0, (), "", "ok")]  # attached, and told so
    for rid in ("early", "late"):
        streams.push(rid, 1, [5, 6])
    assert sent(streams) == [(A, 0, (5, 6), "", "ok")]
    streams.attach(B, Attach("late", 1), 0.0)
    assert sent(streams) == [(B, 0, (5, 6), "", "ok")]


def test_the_last_tokens_and_the_finish_come_in_one_message(streams: Streams) -> None:
    streams.open("r", 1, 0, 0.0)
    streams.attach(A, Attach("r", 1), 0.0)
    sent(streams)
    streams.push("r", 1, [1])
    streams.finish("r", 1, "length", 0.0)
    assert sent(streams) == [(A, 0, (1,), "length", "ok")]
    assert streams.untaken == 0
    streams.push("r", 1, [2])
    streams.finish("r", 1, "failed", 0.0, "engine_failed")
    assert sent(streams) == []


def test_a_full_queue_delays_and_never_loses(streams: Streams) -> None:
    streams.open("r", 1, 0, 0.0)
    streams.attach(A, Attach("r", 1), 0.0)
    sent(streams)
    streams.push("r", 1, [1, 2])
    (send,) = streams.flush(0.0)
    streams.unsent(send, SendFailure.FULL, 0.0)
    streams.push("r", 1, [3])
    streams.finish("r", 1, "stop", 0.0)
    assert sent(streams, RETRY_S / 2) == []
    assert streams.untaken == 1
    assert sent(streams, RETRY_S) == [(A, 0, (1, 2, 3), "stop", "ok")]


def test_a_reader_that_reconnects_reads_on_from_what_it_has(streams: Streams) -> None:
    streams.open("r", 1, 0, 0.0)
    streams.attach(A, Attach("r", 1), 0.0)
    streams.push("r", 1, [1, 2, 3])
    (first,) = [send for send in streams.flush(0.0) if send.message.ids]  # type: ignore[attr-defined]
    streams.unsent(first, SendFailure.GONE, 0.0)
    streams.push("r", 1, [4])
    assert sent(streams, 1.0) == []
    streams.attach(B, Attach("r", 1, have=2), 1.0)
    assert sent(streams, 1.0) == [(B, 2, (3, 4), "", "ok")]


def test_tokens_of_a_resumed_request_are_numbered_over_all_attempts(streams: Streams) -> None:
    streams.open("r", 2, 10, 0.0)
    streams.attach(A, Attach("r", 2, have=10), 0.0)
    streams.push("r", 2, [7])
    assert sent(streams) == [(A, 10, (), "", "ok"), (A, 10, (7,), "", "ok")]


def test_a_newer_attempt_fences_the_older(streams: Streams) -> None:
    streams.open("r", 1, 0, 0.0)
    streams.attach(A, Attach("r", 1), 0.0)
    sent(streams)
    streams.open("r", 2, 0, 0.0)
    assert sent(streams) == [(A, 0, (), "failed", "fenced")]
    streams.attach(B, Attach("r", 1), 0.0)
    assert sent(streams) == [(B, 0, (), "failed", "fenced")]
    streams.push("r", 1, [9])  # the old leg's last breath
    streams.finish("r", 1, "length", 0.0)
    streams.attach(B, Attach("r", 2), 0.0)
    streams.push("r", 2, [1])
    assert sent(streams)[-1] == (B, 0, (1,), "", "ok")


def test_what_nobody_runs_is_answered_after_a_while(streams: Streams) -> None:
    streams.attach(A, Attach("r", 1, have=3), 0.0)
    streams.tick(ATTACH_WAIT_S - 0.1)
    assert sent(streams) == []
    streams.attach(A, Attach("r", 1, have=3), ATTACH_WAIT_S - 0.1)  # asking again does not begin the wait anew
    streams.tick(ATTACH_WAIT_S)
    assert sent(streams) == [(A, 3, (), "failed", "peer_lost")]


def test_a_quiet_stream_shows_that_it_lives(streams: Streams) -> None:
    streams.open("r", 1, 0, 0.0)
    streams.attach(A, Attach("r", 1), 0.0)
    sent(streams)
    streams.tick(KEEPALIVE_S / 2)
    assert sent(streams) == []
    streams.tick(KEEPALIVE_S)
    assert sent(streams) == [(A, 0, (), "", "ok")]


def test_streams_are_forgotten_on_detach_or_a_while_after_the_end(streams: Streams) -> None:
    for rid in ("taken", "left"):
        streams.open(rid, 1, 0, 0.0)
        streams.push(rid, 1, [1])
        streams.finish(rid, 1, "length", 0.0)
    streams.attach(A, Attach("taken", 1), 0.0)
    sent(streams)
    streams.detach(B, Detach("taken", 1))  # not its reader
    assert len(streams) == 2
    streams.detach(A, Detach("taken", 1))
    assert len(streams) == 1
    streams.tick(KEEP_FINISHED_S - 0.1)
    assert len(streams) == 1
    streams.tick(KEEP_FINISHED_S)
    assert len(streams) == 0
    streams.validate()


def test_a_reader_that_detaches_early_stops_being_sent_to(streams: Streams) -> None:
    streams.open("r", 1, 0, 0.0)
    streams.attach(A, Attach("r", 1), 0.0)
    sent(streams)
    streams.detach(A, Detach("r", 1))
    streams.push("r", 1, [1])
    assert sent(streams) == []


def test_attaches_and_finished_streams_are_bounded(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_ATTACHES", 3)
    monkeypatch.setattr(module, "MAX_FINISHED", 3)
    for number in range(10):
        streams.attach(A, Attach(f"p{number}", 1), 0.0)
        streams.open(f"f{number}", 1, 0, 0.0)
        streams.finish(f"f{number}", 1, "cancelled", 0.0, "cancelled")
    assert len(streams) == 3
    assert streams.pending_dropped_total == 7
    streams.tick(ATTACH_WAIT_S)
    assert len([peer for peer, *_ in sent(streams) if peer == A]) == 3


def test_a_very_long_backlog_leaves_in_several_messages(streams: Streams) -> None:
    streams.open("r", 1, 0, 0.0)
    total = MAX_TOKENS_PER_MESSAGE * 2 + 5
    streams.push("r", 1, list(range(total)))
    streams.finish("r", 1, "length", 0.0)
    streams.attach(A, Attach("r", 1), 0.0)
    parts = sent(streams)
    assert [len(ids) for _, _, ids, _, _ in parts] == [MAX_TOKENS_PER_MESSAGE, MAX_TOKENS_PER_MESSAGE, 5]
    assert [finish for *_, finish, _ in parts] == ["", "", "length"]
    assert [token for _, _, ids, _, _ in parts for token in ids] == list(range(total))


def test_a_failed_fence_notice_does_not_rewind_the_new_attempt(streams: Streams) -> None:
    streams.open("r", 2, 0, 0.0)
    streams.attach(A, Attach("r", 2), 0.0)
    streams.push("r", 2, [1, 2])
    sent(streams)
    streams.unsent(Send(A, Tokens("r", 1, 0, (), "failed", "fenced")), SendFailure.FULL, 0.0)
    assert sent(streams, 1.0) == []


def test_the_end_says_how_much_of_the_prompt_was_cached() -> None:
    streams = Streams()
    streams.open("r", 1, 0, 0.0)
    streams.attach(b"c", Attach("r", 1), 0.0)
    streams.flush(0.0)
    streams.push("r", 1, [5])
    (some,) = streams.flush(0.0)
    assert some.message.cached_tokens == 0  # type: ignore[union-attr]
    streams.finish("r", 1, "stop", 0.0, cached_tokens=32)
    (end,) = streams.flush(0.0)
    assert (end.message.finish, end.message.cached_tokens) == ("stop", 32)  # type: ignore[union-attr]
