"""The client's shell against raw sockets that play controller and node."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq
from structlog.testing import capture_logs

from bus.errors import ConfigError, PartFailed, PeerLost, RequestFailed, StartError
from bus.runtime.sockets import Socket, Sockets
from bus.wire.codec import decode, encode
from bus.wire.messages import (
    CLIENT_TO_CONTROLLER,
    TO_NODE_DATA,
    Accepted,
    Attach,
    Cancel,
    Detach,
    DrainRank,
    Failed,
    Location,
    Message,
    RankState,
    RankStatus,
    Refused,
    Role,
    Status,
    StatusQuery,
    Submit,
    Table,
    Tokens,
)
from pdbus.client import AsyncClient, AsyncStream, Client, Piece, Result
from pdbus.client.core import AHEAD, Patience
from pdbus.client.loop_channel import LoopChannel
from pdbus.client.options import controllers_of, make_request
from pdbus.client.output import failure
from pdbus.client.questions import Questions
from pdbus.client.socket_reader import BUDGET
from pdbus.client.traffic import Traffic

WAIT_MS = 30_000
AT = controllers_of("ipc:///nobody/c", None, None)
SAID = {**CLIENT_TO_CONTROLLER, **TO_NODE_DATA}


class Peer:
    """A ROUTER that hears one message at a time. What it has heard it hears again only if asked to: a client repeats
    what stays without an answer for a second, as it may on a busy machine."""

    def __init__(self, socket: Socket, table: Table) -> None:
        self.socket = socket
        self.table = table
        self.other = b""
        self.heard: list[Message] = []

    def hear(self, *, again: bool = False) -> Message:
        while True:
            assert self.socket.poll(WAIT_MS, zmq.POLLIN), "nothing came"
            self.other, header, *_ = self.socket.recv_multipart()
            message = decode(header, self.table)
            if again or message not in self.heard:
                self.heard.append(message)
                return message

    def hear_but_submits(self) -> Message:
        """The next that is no submit: one that was not answered within a second is said again."""
        while isinstance(message := self.hear(), Submit):
            pass
        return message

    def say(self, message: Message) -> None:
        self.socket.send_multipart([self.other, encode(message)])


def rank_of(model: str, number: int, role: Role) -> RankStatus:
    return RankStatus("i", number, role, model, "ready", 1, "", 0, 0.0, None, 0, 0, 0, 0, 0, 0, 0, 0)


@pytest.fixture
def base() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pd") as directory:
        yield f"ipc://{Path(directory)}/c"


@pytest.fixture
def peers(base: str) -> Iterator[tuple[Peer, Peer]]:
    with Sockets() as sockets:
        controller = Peer(sockets.router(f"{base}.clients"), CLIENT_TO_CONTROLLER)
        yield controller, Peer(sockets.router(f"{base}.node"), TO_NODE_DATA)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gives up no silent stream, which would cancel it too."""
    monkeypatch.setattr("pdbus.client.core.SILENCE_S", 1000.0)


def is_cancel(message: Message, rid: str) -> bool:
    return isinstance(message, Cancel) and message.rid == rid


def begin(peers: tuple[Peer, Peer], base: str, attempt: int = 1) -> Submit:
    """Accept the request that comes and take its `attach`."""
    controller, node = peers
    submit = controller.hear()
    assert isinstance(submit, Submit)
    controller.say(Accepted(submit.rid, attempt, submit.bootstrap_room, None, Location("d", 0, 1, f"{base}.node")))
    assert node.hear() == Attach(submit.rid, attempt, 0, True, submit.bootstrap_room)
    return submit


def test_a_stream_through_the_sockets_garbage_included(peers: tuple[Peer, Peer], base: str) -> None:
    controller, node = peers
    with capture_logs() as logs, Client(base, seed=1) as client:
        stream = client.generate_tokens([5, 6], max_tokens=3, leg="pair")
        submit = begin(peers, base)
        assert submit.bootstrap_room is not None
        for garbage in ([b"\x01\x00\xff"], [b""], [b"\x02abc"], [encode(Tokens(submit.rid, 1, 0, (1,))), b"more"]):
            node.socket.send_multipart([node.other, *garbage])
        node.say(Failed(submit.rid, 1, "poison", "a node has no say in this", False))
        controller.say(Tokens(submit.rid, 1, 0, (1,)))
        node.say(Tokens(submit.rid, 1, 0, (10, 11)))
        node.say(Tokens(submit.rid, 1, 2, (12,), "length", found_by="told"))
        assert stream.tokens() == [10, 11, 12]
        assert node.hear() == Detach(submit.rid, 1)
        end = time.monotonic() + WAIT_MS / 1000
        while not any(line.get("peer") == f"{base}.clients" for line in logs):  # which comes over another socket
            assert time.monotonic() < end, "nothing was heard of the controller's"
            time.sleep(0.001)
    rejected = [(line["peer"], line["reason"]) for line in logs if line["event"] == "message.rejected"]
    assert sorted(rejected) == [(f"{base}.clients", "tag"), (f"{base}.node", "syntax")]  # the first of each


def test_what_is_said_waits_for_the_end_of_a_turn_and_a_detach_for_what_comes_next(base: str) -> None:
    sent: list[str] = []
    asked: list[float] = []
    now = [1.0]
    with Sockets() as sockets:
        traffic = Traffic(
            [AT.decode], Patience(), random.Random(1), sockets, lambda: now[0], lambda *_: None, lambda *_: None,
            send=lambda socket, frames: sent.append(type(decode(frames[0], SAID)).__name__),
            flush_soon=lambda: asked.append(now[0]),
        )  # fmt: skip
        requests = [make_request([5], {"max_tokens": 1}, AT, random.Random(n), leg="unified") for n in range(2)]
        ends: list[object] = []
        for request in requests:
            traffic.begin(request, ends.append)
        assert (sent, asked) == ([], [1.0]), "asked for once"
        traffic.flush()
        assert sent == ["Submit", "Submit"]
        one = requests[0].rid
        traffic._received(AT.decode, [encode(Accepted(one, 1, None, None, Location("d", 0, 1, f"{base}.node")))])
        traffic.flush()
        assert sent == ["Submit", "Submit", "Attach"]
        now[0] = 1.01
        traffic._received(f"{base}.node", [encode(Tokens(one, 1, 0, (7,), "length"))])
        traffic.flush()
        assert sent[3:] == []
        assert (len(ends), asked) == (2, [1.0, 1.0]), "its tokens and its end; nobody is to hurry for the detach"
        traffic.tick()
        traffic.flush()
        assert (sent[3:], asked[2:]) == (["Detach"], [1.01])
        traffic.leave()


def test_a_detach_leaves_with_the_next_message_to_its_rank(base: str) -> None:
    """With a submit it would wake the rank, which has nothing to do yet."""
    sent: list[tuple[str, str]] = []

    def send(socket: Socket, frames: Sequence[bytes]) -> None:
        message = decode(frames[0], SAID)
        sent.append((type(message).__name__, getattr(message, "rid", "")))

    with Sockets() as sockets:
        traffic = Traffic(
            [AT.decode], Patience(), random.Random(1), sockets, lambda: 1.0, lambda *_: None, lambda *_: None, send
        )

        def run(rid: str, rank: str, ends: bool = True) -> None:
            traffic.begin(make_request([5], {"max_tokens": 1, "rid": rid}, AT, random.Random(1)), lambda update: None)
            traffic.flush()
            traffic._received(AT.decode, [encode(Accepted(rid, 1, None, None, Location(rank, 0, 1, base + rank)))])
            traffic.flush()
            if ends:
                traffic._received(base + rank, [encode(Tokens(rid, 1, 0, (7,), "length"))])
                traffic.flush()

        run("a", "one")
        run("b", "other")
        assert sent == [("Submit", "a"), ("Attach", "a"), ("Submit", "b"), ("Attach", "b")]
        run("c", "one", ends=False)
        assert sent[4:] == [("Submit", "c"), ("Detach", "a"), ("Attach", "c")]
        traffic.leave()
        assert sent[7:] == [("Cancel", "c"), ("Detach", "b"), ("Detach", "c")]


def test_a_goodbye_that_met_a_full_queue_leaves_with_the_next_tick(base: str) -> None:
    """Though no request is live any more."""
    sent: list[Message] = []
    full = False

    def send(socket: Socket, frames: Sequence[bytes]) -> None:
        if full:
            raise zmq.Again
        sent.append(decode(frames[0], SAID))

    with Sockets() as sockets:
        traffic = Traffic(
            [AT.decode], Patience(), random.Random(1), sockets, lambda: 1.0, lambda *_: None, lambda *_: None, send
        )
        request = make_request([5], {"max_tokens": 1}, AT, random.Random(2), leg="unified")
        traffic.begin(request, lambda update: None)
        where = Location("d", 0, 1, f"{base}.node")
        traffic._received(AT.decode, [encode(Accepted(request.rid, 1, None, None, where))])
        traffic.flush()
        assert [type(message) for message in sent] == [Submit, Attach]
        full = True
        traffic.cancel(request.rid)
        traffic.tick()
        traffic.flush()
        full = False
        for _ in range(2):
            traffic.tick()
            traffic.flush()
        assert [type(message) for message in sent[2:]] == [Cancel, Detach]
        traffic.leave()


def test_a_stream_is_read_by_who_waits_for_several() -> None:
    async def read() -> None:
        cancelled: list[str] = []

        class Silent:
            cancel = cancelled.append

            @staticmethod
            def drop(rid: str, sink: Any) -> None: ...

        told: list[str] = []
        streams = []
        for name in "ab":
            request = make_request([5, 6], {"rid": name}, AT, random.Random(1))
            stream = AsyncStream(Silent(), request, None, dict)  # type: ignore[arg-type]
            stream.on_update(partial(told.append, name))
            streams.append(stream)
        one, other = streams
        assert one.take() is None
        one._sink((1, 2))
        one._sink((3,))
        other._sink(failure("b", "poison", "x"))
        assert told == ["a", "a", "b"]
        assert [one.take(), one.take(), one.take()] == [Piece((1, 2)), Piece((3,)), None]
        assert one.result is None
        assert other.take() is None
        assert other.result is not None
        assert other.result.code == "poison"
        assert one.prompt_ids == (5, 6)
        one._sink((4,))
        one.on_update(None)
        assert told == ["a", "a", "b", "a"]
        one.on_update(partial(told.append, "again"))
        assert told[4:] == ["again"], "for what had come before"
        other.on_update(partial(told.append, "nothing"))
        assert told[5:] == []

    asyncio.run(read())


def test_closing_cancels_and_nobody_waits_for_ever(peers: tuple[Peer, Peer], base: str) -> None:
    controller, _ = peers
    client = Client(base)
    stream = client.generate_tokens([5], leg="pair")
    submit = begin(peers, base)
    client.close()
    client.close()
    assert stream.result.finish == "cancelled"
    assert controller.hear() == Cancel(submit.rid, submit.bootstrap_room)
    with pytest.raises(RuntimeError, match="closed"):
        client.generate_tokens([5], leg="pair")


def test_leaving_the_loop_cancels(peers: tuple[Peer, Peer], base: str) -> None:
    controller, node = peers
    with Client(base) as client:
        stream = client.generate_tokens([5], max_tokens=9, leg="pair")
        submit = begin(peers, base)
        node.say(Tokens(submit.rid, 1, 0, (10,)))
        for _ in stream:
            break
        assert controller.hear() == Cancel(submit.rid, submit.bootstrap_room)
        assert stream.result.ids == (10,)


def test_one_rid_one_live_request(peers: tuple[Peer, Peer], base: str) -> None:
    with Client(base) as client:
        first = client.generate_tokens([5], rid="mine", leg="pair")
        with pytest.raises(RequestFailed) as caught:
            client.generate_tokens([6], rid="mine", leg="pair").tokens()
        assert caught.value.code == "duplicate_rid"
        del first


@pytest.mark.usefixtures("patient")
def test_a_stream_that_is_dropped_unread_cancels_its_request(peers: tuple[Peer, Peer], base: str) -> None:
    controller, _ = peers
    with Client(base) as client:
        stream = client.generate_tokens([5], rid="mine", leg="pair")
        begin(peers, base)
        with pytest.raises(RequestFailed):
            client.generate_tokens([6], rid="mine", leg="pair").tokens()  # which is dropped, and is another
        kept = client.generate_tokens([5], rid="kept", leg="pair")
        begin(peers, base)
        del stream
        assert is_cancel(controller.hear(), "mine")
        assert kept.rid == "kept"


def test_a_stream_that_has_ended_cancels_no_other_request_of_its_rid(peers: tuple[Peer, Peer], base: str) -> None:
    _, node = peers
    with Client(base) as client:
        first = client.generate_tokens([5], rid="mine", max_tokens=1, leg="pair")
        begin(peers, base)
        node.say(Tokens("mine", 1, 0, (10,), "length"))
        assert first.tokens() == [10]
        assert node.hear() == Detach("mine", 1)
        second = client.generate_tokens([5], rid="mine", max_tokens=1, leg="pair")
        begin(peers, base, 1 + AHEAD)
        first.cancel()
        node.say(Tokens("mine", 1 + AHEAD, 0, (11,), "length"))
        assert second.tokens() == [11]


def test_what_lives_on_goes_on_when_its_stream_is_dropped() -> None:
    dropped: list[str] = []

    class Silent:
        @staticmethod
        def drop(rid: str, sink: Any) -> None:
            dropped.append(rid)

    for name, continue_on_disconnect in (("on", True), ("off", False)):
        request = make_request(
            [5], {"rid": name, "continue_on_disconnect": continue_on_disconnect}, AT, random.Random(1)
        )
        AsyncStream(Silent(), request, None, dict)  # type: ignore[arg-type]
    assert dropped == ["off"]


@pytest.mark.usefixtures("patient")
def test_a_stream_of_a_loop_that_is_dropped_unread_cancels_its_request(peers: tuple[Peer, Peer], base: str) -> None:
    controller, _ = peers

    async def run() -> None:
        async with AsyncClient(base) as client:
            stream = await client.generate_tokens([5], rid="mine", leg="pair")
            await asyncio.to_thread(begin, peers, base)
            del stream
            assert is_cancel(await asyncio.to_thread(controller.hear), "mine")

    asyncio.run(run())


@pytest.mark.usefixtures("patient")
def test_who_gives_up_waiting_for_a_stream_cancels_its_request(peers: tuple[Peer, Peer], base: str) -> None:
    controller, _ = peers

    async def run() -> None:
        async with AsyncClient(base) as client:
            stream = await client.generate_tokens([5], leg="pair")
            submit = await asyncio.to_thread(begin, peers, base)
            waiting = asyncio.create_task(stream.wait())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await asyncio.to_thread(controller.hear) == Cancel(submit.rid, submit.bootstrap_room)
            assert (await stream.wait()).finish == "cancelled"

    asyncio.run(run())


def test_questions_are_repeated_until_answered_or_too_late(peers: tuple[Peer, Peer], base: str) -> None:
    controller, _ = peers

    async def ask() -> None:
        async with AsyncClient(base) as client:
            asked = asyncio.create_task(client.status())
            first = await asyncio.to_thread(controller.hear)
            assert isinstance(first, StatusQuery)
            assert await asyncio.to_thread(controller.hear, again=True) == first
            three = ranks("ready", "ready", "ready")
            controller.say(Status(first.id, "c", 1, 0.0, {}, {}, three[:2], remaining=1))
            controller.say(Status(first.id, "c", 1, 0.0, {}, {}, three[2:]))
            assert (await asked) == Status(first.id, "c", 1, 0.0, {}, {}, three)

            draining = asyncio.create_task(client.drain("decode-0", 4))
            order = await asyncio.to_thread(controller.hear)
            assert isinstance(order, DrainRank)
            assert (order.instance, order.dp_rank) == ("decode-0", 4)
            controller.say(Refused("bad_rank", "no rank decode-0/4 is known here", order.id))
            with pytest.raises(RequestFailed, match="no rank decode-0/4"):
                await draining
            with pytest.raises(ConfigError):
                await client.drain("decode-0", 2**70)
            with pytest.raises(PeerLost, match="no controller answers at ipc://"):
                await client.status(timeout_s=0.2)

    asyncio.run(ask())


def test_an_async_stream_and_its_early_end(peers: tuple[Peer, Peer], base: str) -> None:
    controller, node = peers

    async def run() -> None:
        async with AsyncClient(base) as client:
            async with await client.generate_tokens([5], max_tokens=9, leg="pair") as stream:
                submit = await asyncio.to_thread(begin, peers, base)
                node.say(Tokens(submit.rid, 1, 0, (10, 11)))
                async for piece in stream:
                    assert piece.ids == (10, 11)
                    break
            assert await asyncio.to_thread(controller.hear) == Cancel(submit.rid, submit.bootstrap_room)
            assert await asyncio.to_thread(node.hear) == Detach(submit.rid, 1)
            assert (await stream.wait()).finish == "cancelled"
            failing = await client.generate_tokens([5], leg="pair")
            submit = await asyncio.to_thread(begin, peers, base)
            controller.say(Failed(submit.rid, 1, "engine_failed", "it broke", False))
            with pytest.raises(RequestFailed, match="engine_failed: it broke"):
                await failing.tokens()

    asyncio.run(run())


def ranks(*states: RankState) -> tuple[RankStatus, ...]:
    return tuple(
        RankStatus("u", n, "unified", "sim", state, 1, "", 0, 0.0, None, 0, 0, 0, 0, 0, 0, 0, 0)
        for n, state in enumerate(states)
    )


def answer(controller: Peer, *states: RankState) -> int:
    """Take a question, and say that there are ranks in these states; the question's number."""
    query = controller.hear()
    assert isinstance(query, StatusQuery), query
    controller.say(Status(query.id, "c", 1, 0.0, {}, {}, ranks(*states)))
    return query.id


def in_a_loop(base: str) -> None:
    async def run() -> None:
        async with AsyncClient(base, connect_timeout_s=WAIT_MS / 1000) as client:
            await client.generate("hi", rid="r")

    asyncio.run(run())


def in_a_thread(base: str) -> None:
    with Client(base, connect_timeout_s=WAIT_MS / 1000) as client:
        client.generate("hi", rid="r")


@pytest.mark.parametrize("generate", [in_a_thread, in_a_loop])
def test_text_waits_for_the_first_rank_of_a_controller_that_has_just_started(
    peers: tuple[Peer, Peer], base: str, generate: Callable[[str], None]
) -> None:
    """Then the model is known, and whether ranks split."""
    controller, _ = peers
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(generate, base)
        asked = [answer(controller), answer(controller, "gone"), answer(controller, "gone", "starting")]
        assert len(set(asked)) == 3, "a late answer to one question must not be taken for that to the next"
        submit = controller.hear()
        assert isinstance(submit, Submit)
        assert (submit.rid, submit.leg) == ("r", "unified")
        done.result(WAIT_MS / 1000)


def test_how_requests_run_is_learnt_by_model_and_again_when_there_was_no_rank(
    peers: tuple[Peer, Peer], base: str
) -> None:
    """From the ranks that are ready: one that splits may join those that don't, and leave again."""
    controller, _ = peers

    def submit(client: Client, model: str, *roles: Role) -> str:
        """What `legs` the client submits; it asks where `roles` of that model's ready ranks are given."""
        stream = client.generate_tokens([5], model=model) if not roles else None
        if stream is None:
            with ThreadPoolExecutor(1) as pool:
                begun = pool.submit(client.generate_tokens, [5], model=model)
                query = controller.hear()
                assert isinstance(query, StatusQuery)
                ranks = [rank_of(model, number, role) for number, role in enumerate(roles)]
                controller.say(Status(query.id, "c", 1, 0.0, {}, {}, (rank_of("other", 9, "unified"), *ranks)))
                stream = begun.result()
        message = controller.hear()
        while not isinstance(message, Submit):
            message = controller.hear()
        controller.say(Failed(message.rid, 1, "no_rank", "none", True))
        assert stream.result.code == "no_rank"
        return message.leg

    with Client(base, seed=1, retries=0) as client:
        assert submit(client, "m", "unified", "prefill") == "unified"
        assert submit(client, "m", "unified", "prefill", "decode") == "pair", "learnt anew"
        client._learnt["m"] = "unified", 0
        assert submit(client, "m") == "unified", "not asked again"
        client._learnt["m"] = "pair", 0
        assert submit(client, "other", "prefill") == "unified", "what is known of a model is no matter of another"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_patience_with_a_controller_without_ranks_has_an_end(
    peers: tuple[Peer, Peer], base: str, kind: type[Client] | type[AsyncClient]
) -> None:
    """Text needs a model; tokens are for the controller to judge."""
    controller, _ = peers

    async def ask() -> None:
        async with AsyncClient(base, connect_timeout_s=4.0) as client:
            with pytest.raises(ConfigError, match="no rank has joined this controller yet"):
                await client.generate("hi")
            await client.generate_tokens([5], rid="r")

    def ask_in_a_thread() -> None:
        with Client(base, connect_timeout_s=4.0) as client:
            with pytest.raises(ConfigError, match="no rank has joined this controller yet"):
                client.generate("hi")
            client.generate_tokens([5], rid="r")

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(ask_in_a_thread) if kind is Client else pool.submit(asyncio.run, ask())
        while isinstance(message := controller.hear(), StatusQuery):
            controller.say(Status(message.id, "c", 1, 0.0, {}, {}, ()))
        assert isinstance(message, Submit)
        assert (message.rid, message.leg) == ("r", "pair")
        done.result(WAIT_MS / 1000)


def test_no_endpoint_that_a_controller_names_breaks_the_client(peers: tuple[Peer, Peer], base: str) -> None:
    controller, _ = peers
    with capture_logs() as logs, Client(base) as client:
        for endpoint in ("nowhere", "", "udp://1.2.3.4:5", "tcp://[:1"):
            stream = client.generate_tokens([5], leg="pair")
            submit = controller.hear()
            assert isinstance(submit, Submit)
            controller.say(Accepted(submit.rid, 1, submit.bootstrap_room, None, Location("d", 0, 1, endpoint)))
            controller.say(Failed(submit.rid, 1, "poison", "so that it ends", False))
            assert stream.result.code == "poison"
        stream = client.generate_tokens([5], leg="pair")
        begin(peers, base)
        stream.cancel()
    assert next(line["peer"] for line in logs if line["event"] == "rank.unreachable") == "nowhere"


def test_what_a_loop_has_begun_ends_with_it_and_the_client_lives_on(peers: tuple[Peer, Peer], base: str) -> None:
    """`asyncio.run` says that it ends."""
    controller, node = peers
    client = AsyncClient(base)

    async def leave() -> AsyncStream:
        stream = await client.generate_tokens([5], max_tokens=9, leg="pair")
        submit = await asyncio.to_thread(begin, peers, base)
        node.say(Tokens(submit.rid, 1, 0, (10,)))
        assert await stream.next() == Piece((10,))
        return stream

    left = asyncio.run(leave())
    assert is_cancel(controller.hear_but_submits(), left.rid)
    assert node.hear() == Detach(left.rid, 1)
    left.cancel()  # does no harm

    async def again() -> list[int]:
        async with client:
            stream = await client.generate_tokens([5], max_tokens=1, leg="pair")
            submit = await asyncio.to_thread(begin, peers, base)
            node.say(Tokens(submit.rid, 1, 0, (10,), "length"))
            return await stream.tokens()

    assert asyncio.run(again()) == [10]
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(again())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_loop_that_closes_without_a_word_holds_nothing_back(
    peers: tuple[Peer, Peer], base: str, run: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests end when the client is next used, or closed."""
    controller, _ = peers
    client = AsyncClient(base)
    rids = []
    for turns in (3, 0):  # with the socket looked at since something was sent, and not
        loop = asyncio.new_event_loop()
        stream = loop.run_until_complete(client.generate_tokens([5], leg="pair"))
        for _ in range(turns):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        rids.append(stream.rid)
    assert is_cancel(controller.hear_but_submits(), rids[0])
    run(client.close())
    assert is_cancel(controller.hear_but_submits(), rids[1])
    assert "client.failed" not in caplog.text
    assert not stream._updates, "a task of the closed loop that waited for it could not be woken"


def test_loops_in_several_threads_share_a_client_until_one_closes_it(peers: tuple[Peer, Peer], base: str) -> None:
    client, submitted = AsyncClient(base), threading.Barrier(2)
    controller, _ = peers

    async def other() -> str:
        stream = await client.generate_tokens([5], rid="other", leg="pair")
        await asyncio.to_thread(submitted.wait, WAIT_MS / 1000)
        return (await stream.wait()).finish

    async def closes() -> str:
        stream = await client.generate_tokens([5], rid="closes", leg="pair")
        await asyncio.to_thread(submitted.wait, WAIT_MS / 1000)
        await client.close()
        return (await stream.wait()).finish

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(asyncio.run, each) for each in (other(), closes())]
        assert [end.result(WAIT_MS / 1000) for end in ends] == ["cancelled", "cancelled"]
    heard = [controller.hear_but_submits() for _ in range(2)]
    assert {message.rid for message in heard if isinstance(message, Cancel)} == {"other", "closes"}


def test_a_close_that_is_cancelled_closes_all_the_same(peers: tuple[Peer, Peer], base: str) -> None:
    """That no context stays open is `conftest.nothing_is_left`."""

    async def run() -> None:
        loop, go = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        client = AsyncClient(base)
        await client.generate_tokens([5], leg="pair")
        busy = loop.run_in_executor(None, go.wait, WAIT_MS / 1000)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        go.set()
        await busy

    asyncio.run(run())


def test_who_asked_hears_that_another_task_closed_the_client(base: str) -> None:
    """No controller answers there: it would be waited for."""

    async def run() -> None:
        client = AsyncClient(base)
        asks = [asyncio.create_task(each) for each in (client.status(), client.generate_tokens([5]))]
        await asyncio.sleep(0)
        await client.close()
        for ask in asks:
            with pytest.raises(RuntimeError, match="closed"):
                await ask

    asyncio.run(run())


def test_who_is_about_to_ask_hears_that_another_thread_closed_the_client(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes between two steps of each call: after the client was found open, before anything was asked."""
    client = AsyncClient(base)
    channel = client._channel

    async def closed_then() -> Any:
        found = await channel()
        await asyncio.to_thread(asyncio.run, client.close())
        return found

    monkeypatch.setattr(client, "_channel", closed_then)
    calls: list[Callable[[], Any]] = [
        client.status, lambda: client.generate_tokens([5], leg="pair"), lambda: client.drain("i", 0),
    ]  # fmt: skip
    for call in calls:
        client._closed = False
        with pytest.raises(RuntimeError, match="this client is closed"):
            asyncio.run(asyncio.wait_for(call(), WAIT_MS / 1000))


def test_a_client_that_is_closed_while_a_loop_joins_it_serves_none(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = LoopChannel.open

    async def open_then_close(self: LoopChannel) -> None:
        await opened(self)
        client._channels.clear()  # as the one who closes found them: a moment before this one was there
        await asyncio.to_thread(asyncio.run, client.close())

    monkeypatch.setattr(LoopChannel, "open", open_then_close)
    client = AsyncClient(base)
    with pytest.raises(RuntimeError, match="this client is closed"):
        asyncio.run(asyncio.wait_for(client.status(), WAIT_MS / 1000))


@pytest.mark.parametrize("closed", [False, True])
def test_a_close_from_another_loop_beside_the_end_of_this_one(
    base: str, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """It found this loop running, which makes no turn after that and may be `closed` by then."""
    monkeypatch.setattr("pdbus.client.aio.CLOSE_S", WAIT_MS / 1000)
    client, serving, go, closes = AsyncClient(base), threading.Event(), threading.Event(), threading.current_thread()

    async def ends() -> None:
        loop: Any = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def late(*what: Any, **more: Any) -> None:
            if threading.current_thread() is closes:
                go.set()
                end.result(WAIT_MS / 1000)
                if not closed:
                    return
            call(*what, **more)

        loop.call_soon_threadsafe = late
        await client._channel()
        serving.set()
        await asyncio.to_thread(go.wait, WAIT_MS / 1000)

    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(asyncio.run, ends())
        assert serving.wait(WAIT_MS / 1000)
        asyncio.run(asyncio.wait_for(client.close(), WAIT_MS / 2000))


def test_a_close_beside_the_end_of_its_loop_waits_for_that(peers: tuple[Peer, Peer], base: str) -> None:
    """`asyncio.run` ends the generators it knows of when its main task is over, and so may close them while another
    task does."""

    async def run() -> None:
        loop, go = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        client = AsyncClient(base)
        await client.generate_tokens([5], leg="pair")
        busy = loop.run_in_executor(None, go.wait, WAIT_MS / 1000)
        ends = asyncio.create_task(loop.shutdown_asyncgens())
        await asyncio.sleep(0)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(ends, closing, busy)

    asyncio.run(run())


def test_another_thread_may_cancel(peers: tuple[Peer, Peer], base: str) -> None:
    async def run() -> Result:
        async with AsyncClient(base) as client:
            stream = await client.generate_tokens([5], leg="pair")
            await asyncio.to_thread(stream.cancel)
            return await stream.wait()

    assert asyncio.run(run()).finish == "cancelled"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_loop_hears_all_that_came_while_it_did_not_look(
    peers: tuple[Peer, Peer], base: str, run: Callable[[Any], Any]
) -> None:
    """A socket's descriptor tells of it once, and not at all when a message that is sent meanwhile notices it first."""
    controller, node = peers
    many = 3 * BUDGET

    async def talk() -> None:
        async with AsyncClient(base) as client:
            stream = await client.generate_tokens([5], max_tokens=many, leg="pair")
            submit = await asyncio.to_thread(begin, peers, base)
            for number in range(many):
                node.say(Tokens(submit.rid, 1, number, (number,), "length" if number == many - 1 else ""))
            assert await stream.tokens() == list(range(many))
            assert await asyncio.to_thread(node.hear) == Detach(submit.rid, 1)  # nothing had to be asked for again

            for number in range(20):  # each answered before it is waited for, and another one sent in between
                first = await client.generate_tokens([5], rid=f"{number}", leg="pair")
                while (await asyncio.to_thread(controller.hear)).rid != first.rid:  # type: ignore[attr-defined]
                    pass
                controller.say(Failed(first.rid, 1, "engine_failed", "it broke", False))
                time.sleep(
                    0.005
                )  # what is sent sooner after the last look does not notice it: libzmq saves itself that
                second = await client.generate_tokens([5], rid=f"{number}.", leg="pair")
                assert (await first.wait()).code == "engine_failed"
                second.cancel()

    run(talk())


def test_a_node_that_sends_too_many_frames_is_cut_off_from_a_loop_too(peers: tuple[Peer, Peer], base: str) -> None:
    _, node = peers

    async def talk() -> list[int]:
        async with AsyncClient(base) as client:
            first = await client.generate_tokens([5], leg="pair")
            await asyncio.to_thread(begin, peers, base)
            node.socket.send_multipart([node.other, *[b"x"] * 5000])
            while not any(line["event"] == "peer.cut_off" for line in logs):
                await asyncio.sleep(0.001)
            second = await client.generate_tokens([5], max_tokens=1, leg="pair")
            submit = await asyncio.to_thread(begin, peers, base)
            node.say(Tokens(submit.rid, 1, 0, (10,), "length"))
            first.cancel()
            return await second.tokens()

    with capture_logs() as logs:
        assert asyncio.run(talk()) == [10]
    assert [line["event"] for line in logs] == ["peer.cut_off"]


def test_a_client_that_broke_in_a_loop_lets_nobody_wait(
    peers: tuple[Peer, Peer], base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, _ = peers

    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    async def talk() -> None:
        async with AsyncClient(base) as client:
            stream = await client.generate_tokens([5], leg="pair")
            asked = asyncio.create_task(client.drain("decode-0", 4))
            submit = await asyncio.to_thread(controller.hear)
            assert isinstance(submit, Submit)
            monkeypatch.setattr(Questions, "answered", bug)
            controller.say(Refused("bad_rank", "no such rank", 1))
            assert (await stream.wait()).code == "shutting_down"
            with pytest.raises(PartFailed, match="its log says why"):
                await asked
            stream.cancel()
            for call in (client.status, lambda: client.generate_tokens([5])):
                with pytest.raises(PartFailed, match="has failed: ZeroDivisionError: a bug"):
                    await call()

    asyncio.run(talk())


def test_a_loop_that_cannot_connect_opens_nothing(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That no context stays open is `conftest.nothing_is_left`. The second of two controllers is what fails."""
    connect = zmq.Socket.connect

    def fails(self: Any, endpoint: str) -> None:
        connect(self, endpoint)
        if len(connected) == 1:
            raise StartError("no such host")
        connected.append(endpoint)

    async def talk() -> None:
        with pytest.raises(StartError, match="no such host"):
            async with AsyncClient(prefill_controller=base, decode_controller=f"{base}2"):
                pass
        await asyncio.sleep(0)  # nothing of it is looked at any more

    connected: list[str] = []
    monkeypatch.setattr(zmq.Socket, "connect", fails)
    with capture_logs() as logs:
        asyncio.run(talk())
    assert (len(connected), logs) == (1, [])


def test_a_loop_that_only_rests_is_told_what_became_of_its_requests(peers: tuple[Peer, Peer], base: str) -> None:
    client, loop = AsyncClient(base), asyncio.new_event_loop()
    stream = loop.run_until_complete(client.generate_tokens([5], leg="pair"))
    asyncio.run(client.close())
    assert loop.run_until_complete(stream.wait()).finish == "cancelled"
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
