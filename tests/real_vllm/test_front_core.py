"""The client of the bus in the place of an engine core's: when tokens are passed on, and how requests end. Its own
client is scripted, vLLM's records and its OutputProcessor are real."""

from __future__ import annotations

import asyncio
import time
import types
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from status_world import rank, sample
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from bus.errors import PartFailed
from bus.wire.codes import Code
from bus.wire.messages import Status
from pdbus.client import Piece, Result
from pdbus.vllm_front import core as module
from pdbus.vllm_front.asked import ASKED, Asked
from pdbus.vllm_front.core import BusCore
from pdbus.vllm_front.settings import Settings

EOS, STOP = 2, 7


def result(finish: Any, ids: tuple[int, ...], code: Code = "ok", retry_after_s: float = 0.0) -> Result:
    return Result("r", finish, ids, 1, None, None, None, "", 0.0, 0.0, code, f"{code}!", retry_after_s)


class Stream:
    """A stream whose pieces and end are given one by one."""

    def __init__(self) -> None:
        self.pieces: deque[Any] = deque()
        self.result: Result | None = None
        self.cached_tokens, self.written_tokens = 2, 1
        self.prompt_logprobs = ()
        self.cancelled = False
        self.callback: Callable[[], None] | None = None

    def on_update(self, function: Callable[[], None] | None) -> None:
        self.callback = function
        if function is not None and self.pieces:
            function()

    def take(self) -> Piece | None:
        while self.pieces:
            found = self.pieces.popleft()
            if isinstance(found, Piece):
                return found
            self.result = found
        return None

    def put(self, *found: Any) -> None:
        self.pieces.extend(Piece(each) if isinstance(each, tuple) else each for each in found)
        if self.callback is not None:
            self.callback()

    def cancel(self) -> None:
        self.cancelled = True


class Client:
    streams: ClassVar[list[Stream]] = []

    def __init__(self, *_: object) -> None: ...

    async def generate_tokens(self, ids: list[int], **options: Any) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    async def status(self, *, timeout_s: float | None = None) -> Status:
        await asyncio.sleep(3600)
        raise AssertionError

    async def close(self) -> None: ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> BusCore:
    monkeypatch.setattr(module, "EdgeClient", Client)
    Client.streams = []
    config = types.SimpleNamespace(
        structured_outputs_config=types.SimpleNamespace(reasoning_parser=""),
        model_config=types.SimpleNamespace(served_model_name="m"),
    )
    core = BusCore(config, Settings(controller="ipc:///nowhere"))
    core.processor = OutputProcessor(None, log_stats=False)
    return core


def request(**changed: Any) -> EngineCoreRequest:
    params = SamplingParams(**{"max_tokens": 5, "detokenize": False, "output_kind": RequestOutputKind.DELTA, **changed})
    params._eos_token_id = EOS
    made = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1, 2, 3, 4], mm_features=None, sampling_params=params, pooling_params=None,
        arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    made.external_req_id = "x"
    return made


async def submitted(core: BusCore, asked: EngineCoreRequest) -> Stream:
    await core.add_request_async(asked)
    await asyncio.sleep(0)
    return Client.streams[-1]


def outputs(core: BusCore, asked: EngineCoreRequest, *turns: tuple[Any, ...]) -> list[Any]:
    """The outputs that vLLM gets, each turn of the stream with what it gives; None: nothing yet."""

    async def run() -> list[Any]:
        stream = await submitted(core, asked)
        found: list[Any] = []
        for turn in turns:
            stream.put(*turn)
            try:
                got = await asyncio.wait_for(core.get_output_async(), 0.05)
            except TimeoutError:
                found.append(None)
            else:
                (output,) = got.outputs
                found.append((output.new_token_ids, output.finish_reason, output.stop_reason))
        core.shutdown()
        return found

    return asyncio.run(run())


def test_what_came_before_the_submit_returned_is_passed_on(made: BusCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose rid is live ends at once."""

    async def generate_tokens(self: Client, ids: list[int], **options: Any) -> Stream:
        stream = Stream()
        stream.put((10,), result("length", (10,)))
        return stream

    monkeypatch.setattr(Client, "generate_tokens", generate_tokens)

    async def run() -> list[int]:
        await made.add_request_async(request())
        got = await asyncio.wait_for(made.get_output_async(), 5)
        made.shutdown()
        return list(got.outputs[0].new_token_ids)

    assert asyncio.run(run()) == [10]


def test_tokens_are_passed_on_as_they_come_and_the_last_with_its_end(made: BusCore) -> None:
    found = outputs(made, request(), ((10,),), ((11, 12),), ((13, 14),), (result("length", (10, 11, 12, 13, 14)),))
    assert found == [
        ([10], None, None), ([11, 12], None, None), None, ([13, 14], FinishReason.LENGTH, None),
    ]  # fmt: skip


def test_a_token_that_may_end_the_output_waits_for_the_end(made: BusCore) -> None:
    """The end token has no reason of its own, a stop token is its own."""
    assert outputs(made, request(), ((10, EOS),), (result("stop", (10, EOS)),)) == [
        None, ([10, EOS], FinishReason.STOP, None),
    ]  # fmt: skip
    stops = request(stop_token_ids=[STOP], min_tokens=3)
    assert outputs(made, stops, ((STOP,),), ((11,),), ((STOP,), result("stop", (STOP, 11, STOP)))) == [
        None, ([STOP, 11], None, None), ([STOP], FinishReason.STOP, STOP),
    ]  # fmt: skip
    assert outputs(made, request(ignore_eos=True), ((EOS,),)) == [([EOS], None, None)]


def test_the_first_output_tells_what_was_cached_and_written(made: BusCore) -> None:
    async def run() -> Any:
        stream = await submitted(made, request())
        stream.put((10,))
        first = (await made.get_output_async()).outputs[0]
        stream.put((11,))
        second = (await made.get_output_async()).outputs[0]
        made.shutdown()
        return first, second

    first, second = asyncio.run(run())
    assert first.prefill_stats.num_cached_tokens == 2
    assert first.prefill_stats.num_cache_creation_tokens == 1
    assert first.prefill_stats.num_prompt_tokens == 4
    assert first.events
    assert second.prefill_stats is None


def test_vllm_is_told_how_many_requests_run_and_wait_where_that_has_changed(made: BusCore) -> None:
    """Not with each token: its gauges cost more than a token does."""

    async def run() -> list[Any]:
        other = request()
        other.request_id = "s"
        one, two = await submitted(made, request()), await submitted(made, other)
        told = []
        for stream, came in (one, (10,)), (one, (11,)), (two, (12,)), (two, (13,)), (one, result("stop", (10, 11))):
            stream.put(came)
            stats = (await made.get_output_async()).scheduler_stats
            told.append(stats and (stats.num_running_reqs, stats.num_waiting_reqs))
        made.shutdown()
        return told

    assert asyncio.run(run()) == [(1, 1), None, (2, 0), None, (1, 0)]


async def failed(core: BusCore, end: Result) -> tuple[Any, float]:
    """The error that vLLM's request gets, and the hint of the server then."""
    asked = request()
    queue = RequestOutputCollector(RequestOutputKind.DELTA, asked.request_id)
    core.processor.add_request(asked, None, None, 0, queue)
    stream = await submitted(core, asked)
    stream.put((10,), end)
    reading = asyncio.create_task(core.get_output_async())
    with pytest.raises(GracefulHTTPError) as error:
        await asyncio.wait_for(queue.get(), 5)
    reading.cancel()
    assert not core.processor.request_states
    assert not core.dp_engines_running()
    hint_s = core.hint_s()
    core.shutdown()
    return error.value, hint_s


def test_a_request_that_fails_ends_with_its_status(made: BusCore) -> None:
    error, hint_s = asyncio.run(failed(made, result("failed", (10,), "peer_lost")))
    assert (error.http_status, str(error), hint_s) == (503, "peer_lost!", 0)


def test_overloaded_is_503_and_stands_for_the_next_requests(made: BusCore) -> None:
    error, hint_s = asyncio.run(failed(made, result("failed", (), "overloaded", 4.0)))
    assert error.http_status == 503
    assert 3 < hint_s <= 4


def test_an_answer_that_cannot_go_on_is_no_bad_request(made: BusCore) -> None:
    """A rank that refuses to resume says `bad_request`; the request was valid."""
    error, _ = asyncio.run(failed(made, result("failed", (10,), "bad_request")))
    assert (error.http_status, str(error)) == (503, "the answer was interrupted, and cannot be resumed: bad_request!")


def test_a_refusal_after_a_stream_has_begun_is_known_to_the_middleware(made: BusCore) -> None:
    """vLLM asks for admission a second time then."""
    asked = Asked({})
    token = ASKED.set(asked)
    made.draining = True
    try:
        with pytest.raises(GracefulHTTPError, match="shutting down"):
            made.admit()
    finally:
        ASKED.reset(token)
    assert asked.failure is not None
    assert (asked.failure.status, asked.failure.message) == (503, "the server is shutting down")


def test_a_server_that_stood_still_refuses_nobody(made: BusCore) -> None:
    """It has asked for no status meanwhile, and takes its controller for gone after unanswered questions alone."""
    made._follow(sample(0.0, rank("prefill-0"), rank("decode-0")).status, time.monotonic() - 3600.0)
    assert made.unready() == ""
    made._missed(3600.0)  # it stood still once it had asked
    assert made.unready() == ""
    for _ in range(3):
        made._missed(module.MISSED_S)
    assert "the controller has not answered" in made.unready()


def test_a_request_that_vllm_aborts_is_cancelled(made: BusCore) -> None:
    async def run() -> bool:
        stream = await submitted(made, request())
        await made.abort_requests_async(["r", "unknown"])
        made.shutdown()
        return stream.cancelled

    assert asyncio.run(run())
    assert not made.dp_engines_running()


def test_a_client_library_that_broke_ends_the_server(made: BusCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ends a server whose engine core raises."""

    async def broken(self: Client, *, timeout_s: float | None = None) -> Status:
        raise PartFailed("the client has failed")

    monkeypatch.setattr(Client, "status", broken)
    with pytest.raises(PartFailed):
        asyncio.run(asyncio.wait_for(made.get_output_async(), 30))


def test_a_request_that_cannot_be_submitted_ends(made: BusCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the client library raises, as where it was closed meanwhile: vLLM would wait for ever."""

    async def closed(self: Client, ids: list[int], **options: Any) -> Stream:
        raise RuntimeError("the client is closed")

    monkeypatch.setattr(Client, "generate_tokens", closed)

    async def run() -> int:
        asked = request()
        queue = RequestOutputCollector(RequestOutputKind.DELTA, asked.request_id)
        made.processor.add_request(asked, None, None, 0, queue)
        await made.add_request_async(asked)
        reading = asyncio.create_task(made.get_output_async())
        with pytest.raises(GracefulHTTPError) as error:
            await asyncio.wait_for(queue.get(), 30)
        reading.cancel()
        made.shutdown()
        return int(error.value.http_status)

    assert asyncio.run(run()) == 500


def test_a_server_that_leaves_lets_requests_finish_and_fails_what_is_left(made: BusCore) -> None:
    async def run(timeout_s: float, ends: bool) -> tuple[float, Stream]:
        loop = asyncio.get_running_loop()
        stream = await submitted(made, request())
        reading = asyncio.create_task(made.get_output_async())
        if ends:
            loop.call_later(0.2, stream.put, result("stop", ()))
        began = loop.time()
        await asyncio.to_thread(made.shutdown, timeout_s)
        reading.cancel()
        return loop.time() - began, stream

    took_s, stream = asyncio.run(run(60.0, ends=True))
    assert 0.2 <= took_s < 30
    assert not stream.cancelled
    made._client = None  # of another loop now
    took_s, stream = asyncio.run(run(0.0, ends=False))
    assert took_s < 30
    assert stream.cancelled
    assert made.unready() == "the server is shutting down"
