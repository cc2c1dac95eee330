"""Takes the place of vLLM's client of an engine core: each request is submitted to the bus, and its tokens come back.

Owns the requests of one server process and their streams. `fields` and `records` translate; the client library
retries and resumes behind a stream, so vLLM sees a pause at most.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import suppress
from typing import Any

from bus.errors import BusError, ConfigError, PartFailed, RequestFailed
from bus.runtime.logs import Logger
from bus.wire.codes import status_of
from bus.wire.messages import Status, TokenLogprobs
from pdbus.client import AsyncStream, Options
from pdbus.edge.client import NO_RANK_S, EdgeClient
from pdbus.edge.cluster import View
from pdbus.edge.errors import RETRY_AFTER_S
from pdbus.vllm_front import records
from pdbus.vllm_front.asked import ASKED, Asked, Failure
from pdbus.vllm_front.fields import Unsupported, options_of
from pdbus.vllm_front.metrics import FAILED
from pdbus.vllm_front.settings import Settings

LOOK_S = 1.0  # between two questions for the controller's status
MISSED_S = 2 * LOOK_S  # by so much at most an unanswered one ages the last status
OVERLOADED_MOST_S = 10.0  # how long one refusal as overloaded may stand for the next requests
DRAIN_POLL_S = 0.05

log = Logger("vllm.pdbus")  # under this name it shows in vLLM's own log


class Resources:
    """The processes of the engine, as vLLM looks at them: there are none, so none is ever dead."""

    engine_dead = False


class Running:
    """One request of vLLM's: its stream on the bus, and the last tokens, which are held back until it is known whether
    they end the output. vLLM wants the end together with the last token."""

    __slots__ = (
        "asked", "began", "error", "held", "held_logprobs", "id", "listed", "max_tokens", "prompt_ids",
        "prompt_tokens", "prompt_top", "queued_at", "seen", "stops", "stream", "task", "top", "unnamed_stop",
    )  # fmt: skip

    def __init__(self, request: Any, asked: Asked | None) -> None:
        params = request.sampling_params
        self.id: str = request.request_id
        self.asked = asked
        self.prompt_tokens = len(request.prompt_token_ids)
        self.prompt_top: int | None = params.prompt_logprobs
        self.prompt_ids: list[int] = [] if self.prompt_top is None else request.prompt_token_ids
        self.max_tokens: int = params.max_tokens or 0
        self.top: int | None = params.logprobs
        self.unnamed_stop: int | None = None if params.ignore_eos else params.eos_token_id
        self.stops = frozenset(params.stop_token_ids or ()) | {self.unnamed_stop}
        self.queued_at = time.monotonic()
        self.stream: AsyncStream | None = None
        self.task: asyncio.Task[None] | None = None
        self.error: Exception | None = None
        self.began = False  # vLLM has had its first output
        self.listed = False  # it has news
        self.seen = 0  # tokens that came
        self.held: list[int] = []
        self.held_logprobs: list[TokenLogprobs] = []

    def take(self) -> Any:
        """Return what has come since the last call as one output of vLLM's; None where nothing is to be passed on yet.
        It waits for nothing. Raises RequestFailed where the request has failed."""
        assert self.stream is not None
        ids, logprobs = self.held, self.held_logprobs
        while (piece := self.stream.take()) is not None:
            self.seen += len(piece.ids)
            ids.extend(piece.ids)
            logprobs.extend(piece.logprobs)
        result = self.stream.result
        if result is not None and result.finish not in records.FINISHES:
            result.raise_if_failed()
            raise RequestFailed("cancelled", result.message or "the request was cancelled")
        if result is None and (not ids or ids[-1] in self.stops or self.seen >= self.max_tokens):
            return None  # the end may come with the next message
        self.held, self.held_logprobs = [], []
        if result is None:
            return records.output(self.id, ids, logprobs, self.top, None, None)
        last = result.ids[-1] if result.ids else None
        named = result.finish == "stop" and last in self.stops and last != self.unnamed_stop
        return records.output(self.id, ids, logprobs, self.top, result.finish, last if named else None)


class BusCore:
    """The client of the cluster in the place of vLLM's client of an engine core; vLLM calls its `_async` methods. All
    methods but `shutdown` belong to the server's event loop. `view` is the cluster by the controller's last status."""

    def __init__(self, vllm_config: Any, settings: Settings) -> None:
        self.vllm_config = vllm_config
        self.resources = Resources()
        self.engine_ranks_managed = [0]
        self.processor: Any = None  # vLLM's OutputProcessor, once AsyncLLM has it
        self.view = View()
        self.draining = False
        self._settings = settings
        self._reasoning_parser = str(vllm_config.structured_outputs_config.reasoning_parser or "")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: EdgeClient | None = None
        self._looking: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._live: dict[str, Running] = {}
        self._news: list[Running] = []
        self._counts: tuple[int, int] | None = (0, 0)  # that vLLM was told last; None: they may have changed since
        self._wake: asyncio.Future[None] | None = None
        self._overloaded_until = -math.inf
        self._looked_at = 0.0  # until then the controller was asked: a process that stood still has not asked meanwhile
        self._unready_at: float | None = None  # since when a controller says that some role has no ready rank

    # --- what vLLM calls --------------------------------------------------------------------------------------------

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return the kinds of requests that are served."""
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        """Begin to submit a request and return; its output, or its failure, comes by `get_output_async`. Raises vLLM's
        error for a field that cannot be carried."""
        self._start()
        asked = ASKED.get()
        try:
            options = self._options(request, asked)
        except (Unsupported, ValueError) as error:
            name = error.name if isinstance(error, Unsupported) else str(error).partition(":")[0]
            failure = Failure(400, str(error), name)
            self._forget(request.request_id)
            if asked is not None:
                asked.failure = failure
            raise records.error_of(failure) from None
        running = self._live[request.request_id] = Running(request, asked)
        self._counts = None
        running.task = asyncio.create_task(self._submit(running, request.prompt_token_ids, options))

    async def get_output_async(self) -> Any:
        """Wait until output has come, and return that of all requests since the last call. The error of a request that
        failed is not among it: this call gives it to that request in vLLM's tables. Raises PartFailed once the client
        library has broken."""
        self._start()
        assert self._looking is not None
        while True:
            if self._looking.done() and not self._looking.cancelled():
                self._looking.result()  # the connection is broken for good: vLLM ends its server
            news, self._news = self._news, []
            found = [record for running in news if (record := self._taken(running)) is not None]
            if found:
                return records.outputs(found, self._new_counts())
            if not self._news:
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Cancel requests at their ranks, without waiting; unknown ids are ignored."""
        for request_id in request_ids:
            self._cancel(request_id)

    async def reset_mm_cache_async(self) -> None: ...

    async def reset_encoder_cache_async(self) -> None: ...

    def dp_engines_running(self) -> bool:
        """Return true while requests run."""
        return bool(self._live)

    def get_kv_event_sources(self) -> dict[int, Any]:
        """Return where engines publish changes of their caches: nowhere."""
        return {}

    def shutdown(self, timeout: float | None = None) -> None:
        """Refuse new requests, let live ones finish for `timeout` seconds (None: 0), then fail them and begin to close
        the client, without waiting for its end. It blocks for `timeout` + 1 s at most. Called on the loop's own thread
        it fails the live requests at once. A second call changes nothing."""
        loop = self._loop
        self.draining = True
        if loop is None or loop.is_closed():
            return
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is loop:
                self._end()
                return
        until = time.monotonic() + (timeout or 0.0)
        while self._live and time.monotonic() < until:
            time.sleep(DRAIN_POLL_S)
        ended = threading.Event()
        with suppress(RuntimeError):  # the loop has just been closed
            loop.call_soon_threadsafe(self._end, ended)
            ended.wait(1.0)

    # --- what the middleware asks -------------------------------------------------------------------------------------

    def unready(self) -> str:
        """Return the reason why no request can be served now; empty: one can."""
        return "the server is shutting down" if self.draining else self.view.unready(self._looked_at)

    def admit(self) -> None:
        """Raise the error with which a request is refused before it is submitted: while the server shuts down, while
        the cluster is unready (but not in the first NO_RANK_S after a status first said so), and for a while after an
        `overloaded`. The middleware learns of it too: vLLM may ask only after it has begun a stream."""
        failure = self._refusal(time.monotonic())
        if failure is not None:
            if (asked := ASKED.get()) is not None:
                asked.failure = failure
            raise records.error_of(failure)

    def hint_s(self) -> float:
        """Return for how many seconds requests are still refused because the cluster was overloaded; 0 if they are not,
        or are refused for another reason (the middleware then advises 1 s)."""
        return max(0.0, self._overloaded_until - time.monotonic())

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._client is None:
            self._loop = asyncio.get_running_loop()
            settings = self._settings
            self._client = EdgeClient(settings.controller, settings.keys, settings.key_name)
            self._looking = asyncio.create_task(self._look())
            self._looking.add_done_callback(lambda _: self._wake_up())

    def _refusal(self, now: float) -> Failure | None:
        why = self.unready()
        waits = self._unready_at is not None and now - self._unready_at < NO_RANK_S  # a rank may come back meanwhile
        if why and (self.draining or not waits):
            return Failure(503, why)
        if now < self._overloaded_until:
            FAILED.labels("overloaded_before").inc()
            return Failure(503, "the cluster is overloaded; try again later")
        return None

    def _options(self, request: Any, asked: Asked | None) -> Options:
        options = options_of(request, reasoning_parser=self._reasoning_parser)
        if asked is not None:
            options = asked.options() | options
        if request.session_id:
            options["session"] = request.session_id if asked is None else asked.session(request.session_id)
        if model := self._model():
            options["model"] = model
        return options

    async def _look(self) -> None:
        assert self._client is not None
        last = time.monotonic()
        while True:
            try:
                self._follow(await self._client.status(timeout_s=LOOK_S), time.monotonic())
            except PartFailed:
                raise
            except BusError:  # the last status stays, and gets old
                self._missed(time.monotonic() - last)
            last = time.monotonic()
            await asyncio.sleep(0.1 if self.view.seen is None else LOOK_S)

    def _missed(self, waited_s: float) -> None:
        self._looked_at += min(waited_s, MISSED_S)

    def _follow(self, seen: Status, now: float) -> None:
        self._looked_at = now
        fresh = self.view.seen is None
        self.view = self.view.followed_by(seen, now)
        if not self.view.unready(now):
            self._unready_at = None
        elif self._unready_at is None:
            self._unready_at = now
        if fresh:
            models = ", ".join(self.view.models) or "none yet"
            log.info("pdbus.front.connected", controller=self._settings.controller, models=models)

    def _model(self) -> str:
        """Return the model's name on the bus: the one that was set, else the served name where ranks have it."""
        if self._settings.model:
            return self._settings.model
        served = self.vllm_config.model_config.served_model_name
        for name in [served] if isinstance(served, str) else served or ():
            if name in self.view.models:
                return str(name)
        return ""

    async def _submit(self, running: Running, ids: list[int], options: Options) -> None:
        assert self._client is not None
        try:
            running.stream = await self._client.generate_tokens(ids, **options)
        except Exception as error:  # a request that vLLM does not hear of would hang
            running.error = error
            self._list_news(running)
            return
        running.stream.on_update(lambda: self._list_news(running))

    def _list_news(self, running: Running) -> None:
        """Have `get_output_async` look at this request."""
        if not running.listed:
            running.listed = True
            self._news.append(running)
            self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _taken(self, running: Running) -> Any:
        running.listed = False
        if self._live.get(running.id) is not running:
            return None  # it was cancelled
        try:
            if running.error is not None:
                raise running.error
            assert running.stream is not None
            record = running.take()
        except Exception as error:
            self._fail(running, error)
            return None
        if running.stream.result is not None:
            del self._live[running.id]
            self._counts = None
        if record is not None and not running.began:
            running.began = True
            self._counts = None
            if running.asked is not None:
                running.asked.began = True
            stream = running.stream
            records.began(record, running.prompt_tokens, stream.cached_tokens, stream.written_tokens, running.queued_at)
            if running.prompt_top is not None:
                records.of_prompt(record, running.prompt_ids, stream.prompt_logprobs, running.prompt_top)
        return record

    def _new_counts(self) -> tuple[int, int] | None:
        """Return how many requests run and how many wait; None where that is as it was at the last call."""
        if self._counts is not None:
            return None
        waiting = sum(not running.began for running in self._live.values())
        self._counts = len(self._live) - waiting, waiting
        return self._counts

    def _fail(self, running: Running, error: Exception) -> None:
        """End a request with vLLM's form of an error, whatever it is: one that vLLM does not hear of would hang."""
        failure = self._failure(error, running.seen)
        if failure.status >= 500:
            log.warning("pdbus.front.failed", rid=running.id, status=failure.status, message=failure.message)
        if running.asked is not None:
            running.asked.failure = failure
        self._cancel(running.id)
        for other in records.fail(self.processor, running.id, records.error_of(failure)):
            self._cancel(other)

    def _failure(self, error: Exception, seen: int) -> Failure:
        """Count an error of a request of which `seen` tokens have come, and return its answer."""
        if isinstance(error, ConfigError):  # the message begins with the option at fault
            FAILED.labels("bad_request").inc()
            word = str(error).split(maxsplit=1)[0].rstrip(":")
            return Failure(400, str(error), word if word in Options.__annotations__ else None)
        if isinstance(error, RequestFailed):
            if error.code == "bad_request" and seen:  # to go on elsewhere was refused; the request itself was valid
                FAILED.labels("interrupted").inc()
                return Failure(503, f"the answer was interrupted, and cannot be resumed: {error.message}")
            FAILED.labels(error.code).inc()
            if error.code != "overloaded":
                return Failure(status_of(error.code), error.message, None, error.retry_after_s)
            hint_s = min(max(error.retry_after_s, RETRY_AFTER_S), OVERLOADED_MOST_S)
            self._overloaded_until = time.monotonic() + hint_s
            return Failure(503, error.message, None, hint_s)
        if isinstance(error, BusError):
            FAILED.labels("part_failed" if isinstance(error, PartFailed) else "peer_lost").inc()
            return Failure(503, str(error))
        FAILED.labels("crashed").inc()
        log.exception("pdbus.front.crashed")
        return Failure(500, "the server has failed; its log says why")

    def _cancel(self, request_id: str) -> None:
        running = self._live.pop(request_id, None)
        if running is None:
            return
        self._counts = None
        if running.stream is not None:
            running.stream.on_update(None)
            running.stream.cancel()
        elif running.task is not None:
            running.task.cancel()

    def _forget(self, request_id: str) -> None:
        """Take a refused request out of vLLM's tables, which vLLM itself does for one of several answers alone."""
        if self.processor is not None:
            state = self.processor.request_states.get(request_id)
            if state is not None and state.parent_req is None:
                self.processor.abort_requests([request_id], internal=True)

    def _end(self, ended: threading.Event | None = None) -> None:
        for running in list(self._live.values()):
            self._fail(running, RequestFailed("shutting_down", "the server is shutting down"))
        if self._looking is not None:
            self._looking.cancel()
        if self._client is not None and self._loop is not None:
            self._closing = self._loop.create_task(self._client.close())
        if ended is not None:
            ended.set()
