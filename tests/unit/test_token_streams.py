"""Token streams: each token once and in order for any reader, none ever waited for (M57 M58 M59 M60 M61 M82 M83)."""

from __future__ import annotations

import weakref
from array import array

import pytest
from link_world import unified_leg

from bus.actions import Send
from bus.wire.codec import MAX_HEADER_BYTES, encode
from bus.wire.codes import Code
from bus.wire.messages import (
    MAX_LOGPROBS_PER_MESSAGE,
    MAX_OTHERS_PER_MESSAGE,
    MAX_TOKENS_PER_MESSAGE,
    Attach,
    Detach,
    MoreTokens,
    Role,
    TokenLogprobs,
    Tokens,
)
from nodes.link import streams as module
from nodes.link.leg import Leg
from nodes.link.streams import (
    ATTACH_GRACE_S,
    ATTACH_WAIT_S,
    KEEP_FINISHED_S,
    KEEPALIVE_S,
    MAX_SHARED_IDS,
    RETRY_S,
    SendFailure,
    Streams,
)

A, B = b"reader-a", b"reader-b"


def sent(streams: Streams, now: float = 0.0) -> list[tuple[bytes, int, tuple[int, ...], str, str]]:
    streams.validate()
    out = []
    for send in streams.flush(now):
        message = send.message
        assert isinstance(message, Tokens)
        out.append((send.peer, message.start, message.ids, message.finish, message.code))
    return out


def opened(streams: Streams, rid: str = "r", attempt: int = 1, offset: int = 0) -> Leg:
    """A unified leg that was taken in."""
    leg = unified_leg(rid, attempt, offset)
    streams.open(leg, 0.0)
    return leg


def end(streams: Streams, leg: Leg, code: Code = "ok", message: str = "length") -> None:
    leg.end(code, message, 0.0)
    streams.finish(leg)


@pytest.fixture
def streams() -> Streams:
    return Streams()


def test_attach_first_or_dispatch_first_gives_the_same(streams: Streams) -> None:
    streams.attach(A, Attach("early", 1), 0.0)
    legs = [opened(streams, "early"), opened(streams, "late")]
    assert sent(streams) == [(A, 0, (), "", "ok")]  # attached, and told so
    for leg in legs:
        streams.push(leg, [5, 6])
    assert sent(streams) == [(A, 0, (5, 6), "", "ok")]
    streams.attach(B, Attach("late", 1), 0.0)
    assert sent(streams) == [(B, 0, (5, 6), "", "ok")]


def test_the_last_tokens_and_the_finish_come_in_one_message(streams: Streams) -> None:
    leg = opened(streams)
    streams.attach(A, Attach("r", 1), 0.0)
    sent(streams)
    streams.push(leg, [1])
    end(streams, leg)
    assert sent(streams) == [(A, 0, (1,), "length", "ok")]
    assert streams.untaken(0.0) == 0


def test_an_end_that_comes_after_the_last_tokens_is_said_by_itself_and_once(streams: Streams) -> None:
    """M58."""
    leg = opened(streams)
    streams.attach(A, Attach("r", 1), 0.0)
    streams.push(leg, [1])
    assert sent(streams)[-1] == (A, 0, (1,), "", "ok")
    end(streams, leg)
    assert sent(streams) == [(A, 1, (), "length", "ok")]
    assert sent(streams) == []


def test_what_a_step_made_for_several_requests_of_a_reader_leaves_in_one_message(streams: Streams) -> None:
    """M83. Not what says more than tokens: an attempt's first, which tells of the prefill rank, and its last."""
    legs = {rid: opened(streams, rid) for rid in ("a", "b", "c", "alone")}
    for rid in legs:
        streams.attach(B if rid == "c" else A, Attach(rid, 1, several=rid != "alone"), 0.0)
        streams.push(legs[rid], [1])
    assert len(streams.flush(0.0)) == 4 + 4, "each is told that it is attached, and the first token of each"
    for leg in legs.values():
        streams.push(leg, [2])
    assert streams.flush(0.0) == [
        Send(A, Tokens("alone", 1, 1, (2,), found_by="")),
        Send(A, Tokens("a", 1, 1, (2,), others=(MoreTokens("b", 1, 1, (2,)),))),
        Send(B, Tokens("c", 1, 1, (2,))),
    ]
    streams.push(legs["a"], range(MAX_SHARED_IDS + 1))
    streams.push(legs["b"], [3])
    end(streams, legs["b"])
    assert all(not send.message.others for send in streams.flush(0.0))  # type: ignore[attr-defined]


def test_a_message_of_several_requests_that_could_not_be_sent_costs_none_of_them_a_token(streams: Streams) -> None:
    """Nor has one more streams than the protocol allows."""
    rids = [f"r{number}" for number in range(MAX_OTHERS_PER_MESSAGE + 2)]
    legs = {rid: opened(streams, rid) for rid in rids}
    for rid, leg in legs.items():
        streams.attach(A, Attach(rid, 1, several=True), 0.0)
        streams.push(leg, [1])
    streams.flush(0.0)
    for leg in legs.values():
        streams.push(leg, [2])
    sends = streams.flush(0.0)
    assert [len(send.message.others) for send in sends] == [MAX_OTHERS_PER_MESSAGE, 0]  # type: ignore[attr-defined]
    for send in sends:
        streams.unsent(send, SendFailure.FULL, 0.0)
    streams.push(legs["r1"], [3])
    again = streams.flush(RETRY_S)
    pieces = [(each.rid, each.ids) for s in again for each in (s.message, *s.message.others)]  # type: ignore[attr-defined]
    assert sorted(pieces) == sorted((rid, (2, 3) if rid == "r1" else (2,)) for rid in rids)
    streams.unsent(again[0], SendFailure.GONE, RETRY_S)
    assert sum(leg.lost for leg in legs.values()) == 1 + MAX_OTHERS_PER_MESSAGE


def test_a_full_queue_delays_and_never_loses(streams: Streams) -> None:
    leg = opened(streams)
    streams.attach(A, Attach("r", 1), 0.0)
    sent(streams)
    streams.push(leg, [1, 2])
    (send,) = streams.flush(0.0)
    streams.unsent(send, SendFailure.FULL, 0.0)
    streams.push(leg, [3])
    end(streams, leg, message="stop")
    assert sent(streams, RETRY_S / 2) == []
    assert streams.untaken(99.0) == 1, "a slow reader is a reader"
    assert sent(streams, RETRY_S) == [(A, 0, (1, 2, 3), "stop", "ok")]


def test_an_end_that_nobody_came_for_is_due_for_a_while_one_whose_reader_was_cut_off_for_longer(
    streams: Streams,
) -> None:
    legs = {rid: opened(streams, rid) for rid in ("never read", "left", "cut off")}
    for rid, leg in legs.items():
        if rid != "never read":
            streams.attach(A, Attach(rid, 1), 0.0)
        streams.push(leg, [1])
    streams.detach(A, Detach("left", 1))
    (cut_off,) = [send for send in streams.flush(0.0) if send.message.ids]  # type: ignore[attr-defined]
    streams.unsent(cut_off, SendFailure.GONE, 0.0)
    for leg in legs.values():
        leg.end("ok", "length", 7.0)
        streams.finish(leg)
    assert streams.untaken(7.0) == 2, "what was left wants nothing more"
    assert streams.untaken(7.0 + ATTACH_GRACE_S) == 1
    streams.attach(B, Attach("cut off", 1), 9.0)
    assert sent(streams, 9.0) == [(B, 0, (1,), "length", "ok")]
    assert streams.untaken(9.0) == 0


def test_a_reader_that_reconnects_reads_on_from_what_it_has(streams: Streams) -> None:
    leg = opened(streams)
    streams.attach(A, Attach("r", 1), 0.0)
    streams.push(leg, [1, 2, 3])
    (first,) = [send for send in streams.flush(0.0) if send.message.ids]  # type: ignore[attr-defined]
    streams.unsent(first, SendFailure.GONE, 0.0)
    streams.push(leg, [4])
    assert sent(streams, 1.0) == []
    streams.attach(B, Attach("r", 1, have=2), 1.0)
    assert sent(streams, 1.0) == [(B, 2, (3, 4), "", "ok")]


def test_tokens_of_a_resumed_request_are_numbered_over_all_attempts(streams: Streams) -> None:
    leg = opened(streams, attempt=2, offset=10)
    streams.attach(A, Attach("r", 2, have=10), 0.0)
    streams.push(leg, [7])
    assert sent(streams) == [(A, 10, (), "", "ok"), (A, 10, (7,), "", "ok")]


def test_a_newer_attempt_fences_the_older(streams: Streams) -> None:
    old = opened(streams)
    streams.attach(A, Attach("r", 1), 0.0)
    sent(streams)
    new = opened(streams, attempt=2)
    assert sent(streams) == [(A, 0, (), "failed", "fenced")]
    streams.attach(B, Attach("r", 1), 0.0)
    assert sent(streams) == [(B, 0, (), "failed", "fenced")]
    streams.push(old, [9])  # its last breath
    end(streams, old)
    streams.attach(B, Attach("r", 2), 0.0)
    streams.push(new, [1])
    assert sent(streams)[-1] == (B, 0, (1,), "", "ok")


def test_what_nobody_runs_is_answered_after_a_while(streams: Streams) -> None:
    streams.attach(A, Attach("r", 1, have=3), 0.0)
    streams.tick(ATTACH_WAIT_S - 0.1)
    assert sent(streams) == []
    streams.attach(A, Attach("r", 1, have=3), ATTACH_WAIT_S - 0.1)  # asking again does not begin the wait anew
    streams.tick(ATTACH_WAIT_S)
    assert sent(streams) == [(A, 3, (), "failed", "peer_lost")]


def test_who_detaches_before_the_dispatch_waits_no_more(streams: Streams) -> None:
    streams.attach(A, Attach("r", 1), 0.0)
    streams.detach(B, Detach("r", 1))  # another reader's
    streams.attach(B, Attach("s", 1), 0.0)
    streams.detach(B, Detach("s", 1))
    streams.tick(ATTACH_WAIT_S)
    assert sent(streams) == [(A, 0, (), "failed", "peer_lost")]


def test_a_quiet_stream_shows_that_it_lives(streams: Streams) -> None:
    opened(streams)
    streams.attach(A, Attach("r", 1), 0.0)
    sent(streams)
    streams.tick(KEEPALIVE_S / 2)
    assert sent(streams) == []
    streams.tick(KEEPALIVE_S)
    assert sent(streams) == [(A, 0, (), "", "ok")]


def test_streams_are_forgotten_on_detach_or_a_while_after_the_end(streams: Streams) -> None:
    for rid in ("taken", "left"):
        leg = opened(streams, rid)
        streams.push(leg, [1])
        end(streams, leg)
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
    leg = opened(streams)
    streams.attach(A, Attach("r", 1), 0.0)
    sent(streams)
    streams.detach(A, Detach("r", 1))
    streams.push(leg, [1])
    assert sent(streams) == []


def test_attaches_and_finished_streams_are_bounded(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_ATTACHES", 3)
    monkeypatch.setattr(module, "MAX_FINISHED", 3)
    for number in range(10):
        streams.attach(A, Attach(f"p{number}", 1), 0.0)
        end(streams, opened(streams, f"f{number}"), "cancelled", "")
    assert len(streams) == 3
    assert streams.pending_dropped_total == 7
    streams.tick(ATTACH_WAIT_S)
    assert len([peer for peer, *_ in sent(streams) if peer == A]) == 3


def test_a_very_long_backlog_leaves_in_several_messages(streams: Streams) -> None:
    leg = opened(streams)
    total = MAX_TOKENS_PER_MESSAGE * 2 + 5
    streams.push(leg, list(range(total)))
    end(streams, leg)
    streams.attach(A, Attach("r", 1), 0.0)
    parts = sent(streams)
    assert [len(ids) for _, _, ids, _, _ in parts] == [MAX_TOKENS_PER_MESSAGE, MAX_TOKENS_PER_MESSAGE, 5]
    assert [finish for *_, finish, _ in parts] == ["", "", "length"]
    assert [token for _, _, ids, _, _ in parts for token in ids] == list(range(total))


def test_a_failed_fence_notice_does_not_rewind_the_new_attempt(streams: Streams) -> None:
    leg = opened(streams, attempt=2)
    streams.attach(A, Attach("r", 2), 0.0)
    streams.push(leg, [1, 2])
    sent(streams)
    streams.unsent(Send(A, Tokens("r", 1, 0, (), "failed", "fenced")), SendFailure.FULL, 0.0)
    assert sent(streams, 1.0) == []


def test_a_leg_whose_place_a_newer_attempt_took_is_sent_to_nobody(streams: Streams) -> None:
    """Where another rank of the process took it, the older one may run on for a while."""
    old = opened(streams)
    streams.attach(A, Attach("r", 1), 0.0)
    new = opened(streams, attempt=2)
    streams.attach(A, Attach("r", 2), 0.0)
    end(streams, new)
    sent(streams)
    streams.detach(A, Detach("r", 2))
    streams.push(old, [9])
    end(streams, old)
    assert sent(streams) == []
    assert len(streams) == 0


def test_what_is_kept_for_a_reader_holds_no_prompt(streams: Streams) -> None:
    """And the leg does: an engine's thread may not have read it yet."""
    leg = opened(streams)
    leg.prompt, seen = array("i", [5] * 9), weakref.ref(leg.prompt)
    end(streams, leg)
    assert len(leg.prompt) == 9
    del leg
    assert seen() is None
    streams.attach(A, Attach("r", 1), 0.0)
    assert sent(streams) == [(A, 0, (), "length", "ok")]


@pytest.mark.parametrize("role", ["unified", "decode"])
def test_the_first_tokens_and_the_end_say_how_much_of_the_prompt_was_cached_and_written(
    streams: Streams, role: Role
) -> None:
    leg = opened(streams)
    leg.role, leg.cached_tokens, leg.cached_at_prefill = role, 16, 32
    leg.written_tokens, leg.written_at_prefill = 48, 64
    streams.attach(A, Attach("r", 1), 0.0)
    said = []
    for token in (5, 6, None):
        if token is None:
            end(streams, leg)
        else:
            streams.push(leg, [token])
        for send in streams.flush(0.0):
            message = send.message
            assert isinstance(message, Tokens)
            if message.ids or message.finish:
                said.append((message.finish, message.cached_tokens, message.written_tokens))
    told = (16, 48) if role == "unified" else (32, 64)
    assert said == [("", *told), ("", 0, 0), ("length", *told)]


@pytest.mark.parametrize("have", [0, 1, MAX_LOGPROBS_PER_MESSAGE + 1])
def test_each_token_comes_with_its_log_probabilities_wherever_a_reader_begins(streams: Streams, have: int) -> None:
    """M82; and in frames that a peer takes, however many and however long they are."""
    leg = opened(streams, offset=0)
    count = 2 * MAX_LOGPROBS_PER_MESSAGE + 3
    top = tuple((2**31 - 1 - n, -1.0 / 3) for n in range(20))
    for token in range(count):
        streams.push(leg, [token], [TokenLogprobs(-float(token), top)])
    end(streams, leg)
    streams.attach(A, Attach("r", 1, have), 0.0)
    messages = [send.message for send in streams.flush(0.0)]
    ids: list[int] = []
    for message in messages:
        assert isinstance(message, Tokens)
        assert [-float(token) for token in message.ids] == [each.logprob for each in message.logprobs]
        assert len(encode(message)) < MAX_HEADER_BYTES
        ids += message.ids
    assert ids == list(range(have, count))


@pytest.mark.parametrize("ended", [False, True])
def test_the_prompts_log_probabilities_come_with_the_first_tokens_to_each_reader(streams: Streams, ended: bool) -> None:
    """They come in a frame that a peer takes, however large they are."""
    leg = opened(streams, offset=0)
    top = tuple((2**31 - 1 - n, -1.0 / 3) for n in range(20))
    leg.prompt_logprobs = tuple(TokenLogprobs(-float(n), top, 2**31) for n in range(MAX_LOGPROBS_PER_MESSAGE))
    count = MAX_LOGPROBS_PER_MESSAGE + 3
    streams.push(leg, range(count), [TokenLogprobs(-1.0, top, 2**31)] * count)
    if ended:
        end(streams, leg)
    for reader in (A, B):
        streams.attach(reader, Attach("r", 1), 0.0)
        first, *rest = [send.message for send in streams.flush(0.0) if send.peer == reader]
        assert isinstance(first, Tokens)
        assert first.ids
        assert first.prompt_logprobs == leg.prompt_logprobs
        assert len(encode(first)) < MAX_HEADER_BYTES
        ids = list(first.ids)
        for message in rest:
            assert isinstance(message, Tokens)
            assert not message.prompt_logprobs
            ids += message.ids
        assert ids == list(range(count))
