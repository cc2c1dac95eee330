"""The edge as an ASGI application (the interface between Python's web servers and programs): its endpoints, and the
steps of a request on its way to the client library.

Owns the tables of live exchanges (requests with their responses) and loaded tokenizers; binds no port (see `server`)
and talks to no rank itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any
from urllib.parse import quote

import msgspec
from prometheus_client.exposition import choose_encoder

from bus.errors import BusError, PartFailed
from bus.runtime.epochs import wall_s
from bus.runtime.logs import get_logger
from bus.runtime.spans import Spans
from bus.tracecontext import Span
from pdbus import pages
from pdbus.client import AsyncClient, Options
from pdbus.edge import answers, fields, jobs, openapi
from pdbus.edge.cluster import ServedModel, View
from pdbus.edge.config import EdgeConfig
from pdbus.edge.errors import CLIENT_GONE, HttpError, invalid, of_bus
from pdbus.edge.exchange import PRIORITY_MAX, Exchange, Receive, Scope, Send
from pdbus.edge.fleet import PAGE, RANK, REQUEST, STREAM, Fleet, refuse_other_hosts
from pdbus.edge.generation import Choice, Generation, Gone, Interrupted
from pdbus.edge.keys import SLO_CLASS_MAX, Key, Keys
from pdbus.edge.logprobs import Likelihoods
from pdbus.edge.metrics import Counts
from pdbus.edge.refused import FRONT, FRONT_PATHS
from pdbus.edge.tracing import Answered, follow, span_of
from pdbus.text.decoder import BEFORE
from pdbus.text.stops import StopFinder

MAX_RESTARTS = 2  # how often an interrupted answer without streaming is started again
LOOK_S = 1.0  # between two checks of the cluster, the keys, and clients that have stopped reading

log = get_logger("edge")
encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint: its HTTP method and the function that answers it. HEAD is answered as GET."""

    method: str
    serve: Callable[[Exchange], Awaitable[None]]
    open: bool = False  # needs no key
    of_cluster: bool = True  # its answer depends on the cluster


class Edge:
    """The application: `await edge(scope, receive, send)`. The owner calls `await edge.look()` every LOOK_S. `view` is
    the cluster by the controller's last status, `counts` has the metrics; `spans` gets the spans of traced requests
    (None: none are exported). `fleet` serves `/fleet`; a text is the reason why nothing does. Raises ConfigError for an
    invalid file of keys."""

    def __init__(
        self, config: EdgeConfig, client: AsyncClient, clock: Callable[[], float] = time.monotonic,
        spans: Spans | None = None, fleet: Fleet | str = "this edge shows no fleet",
    ) -> None:  # fmt: skip
        self._config = config
        self._client = client
        self._clock = clock
        self._wall_s = wall_s(clock)
        self._spans = spans
        self._fleet = fleet
        self._keys = Keys(config.api_keys) if config.api_keys else None
        self._texts = jobs.TextLoader(config.tokenizers)
        self._live: dict[Exchange, Key | None] = {}
        self.counts = Counts()
        self.view = View()
        self._asking: asyncio.Task[None] | None = None
        self._routes = {
            "/v1/chat/completions": Route("POST", self._chat),
            "/v1/completions": Route("POST", self._completions),
            "/generate": Route("POST", self._generate),
            "/tokenize": Route("POST", self._tokenize),
            "/detokenize": Route("POST", self._detokenize),
            "/v1/models": Route("GET", self._models),
            "/load": Route("GET", self._load),
            "/health": Route("GET", self._health, open=True, of_cluster=False),
            "/ping": Route("GET", self._health, open=True, of_cluster=False),
            "/version": Route("GET", self._version, open=True, of_cluster=False),
            "/ready": Route("GET", self._ready, open=True),
            "/metrics": Route("GET", self._metrics, open=True, of_cluster=False),
            "/openapi.json": Route("GET", self._openapi, open=True, of_cluster=False),
            "/docs": Route("GET", self._docs, open=True, of_cluster=False),
            "/": Route("GET", self._home, open=True, of_cluster=False),
            PAGE: Route("GET", self._fleet_page, open=True, of_cluster=False),
            STREAM: Route("GET", self._fleet_stream, of_cluster=False),
        }

    # --- from outside -----------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request to its end. Errors become HTTP errors; only cancellation, or a scope other than http,
        raises."""
        if scope["type"] != "http":
            raise RuntimeError(f"an edge serves http, not {scope['type']}")
        exchange = Exchange(scope, receive, send, self._config, self._clock)
        try:
            if exchange.preflight:
                await exchange.allow()
                return
            await self._serve(exchange)
        except HttpError as error:
            await self._fail(exchange, error)
        except Gone:
            await self._fail(exchange, HttpError(CLIENT_GONE, "the client left", code="cancelled"))
        except BusError as error:
            await self._fail(exchange, of_bus(error))
        except Exception:  # a bug of ours
            log.exception("request.crashed", rid=exchange.rid, path=exchange.path)
            await self._fail(exchange, HttpError(500, "the edge has failed; its log says why", code="internal_error"))
        finally:
            status = CLIENT_GONE if exchange.gone else exchange.status
            if exchange.span is not None and self._spans is not None:
                exchange.span.status, exchange.span.ended_at = status, self._clock()
                self._spans.add(exchange.span, self._span_of)
            self.counts.requests[exchange.path if exchange.path in self._routes else "other", str(status)] += 1

    def reconfigure(self, config: EdgeConfig) -> None:
        """Use `config` from the next request on."""
        self._config = config

    def _span_of(self, answered: Answered) -> Span:
        return span_of(answered, self._wall_s)

    async def look(self) -> None:
        """Ask the controller for its status (waiting up to LOOK_S), read the keys again if they have changed, and end
        the exchanges whose client has stopped reading. Without an answer the last status stays. Raises PartFailed once
        the client library has failed for good."""
        if self._keys is not None:
            self._keys.refresh()
        now = self._clock()
        for exchange in self._live:
            if exchange.overdue(now):
                log.warning("client.stopped_reading", rid=exchange.rid)
                exchange.task.cancel()
        if isinstance(self._fleet, Fleet):
            for exchange, key in self._live.items():
                if exchange.path == STREAM and key is not None and self._keys is not None and not self._keys.holds(key):
                    exchange.abort()
            self._fleet.look()
        await self._ask()

    def end_streams(self) -> None:
        """End the streams of the fleet, which go on until their readers leave."""
        if isinstance(self._fleet, Fleet):
            self._fleet.end()

    def leave(self) -> None:
        """Cancel a running question to the controller, at the end of the process."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        """Get the controller's status now. Calls at the same time share one answer."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._see())
        await asyncio.shield(self._asking)

    async def _see(self) -> None:
        try:
            self.view = self.view.followed_by(await self._client.status(timeout_s=LOOK_S), self._clock())
            for name in self.view.models:
                self._texts.begin(name)
        except PartFailed:
            raise
        except BusError:
            pass  # the last status stays, and gets old
        finally:
            self._asking = None

    # --- every request ----------------------------------------------------------------------------------------------

    async def _serve(self, exchange: Exchange) -> None:
        route = self._routes.get(exchange.path)
        if route is None and exchange.path.startswith("/v1/models/"):
            route = Route("GET", self._model)
        elif route is None and pages.asset(exchange.path) is not None:
            route = Route("GET", self._asset, open=True, of_cluster=False)
        elif route is None and exchange.path.startswith(RANK):
            route = Route("GET", self._fleet_rank, of_cluster=False)
        elif route is None and exchange.path.startswith(REQUEST):
            route = Route("GET", self._fleet_request, of_cluster=False)
        if route is None:
            instead = FRONT if exchange.path in FRONT_PATHS else "see /docs"
            raise HttpError(404, f"there is no {exchange.path[:200]}; {instead}", code="not_found")
        if exchange.method != route.method and (exchange.method, route.method) != ("HEAD", "GET"):
            allowed = ((b"allow", route.method.encode()),)
            raise HttpError(405, f"{exchange.path} takes {route.method}", code="method_not_allowed", headers=allowed)
        exchange.check()
        key = None
        if self._keys is not None and not route.open:
            key = self._keys.find(exchange.headers.get(b"authorization", b""))
            if key is None:
                why = "send a valid key, as in: Authorization: Bearer KEY"
                raise HttpError(401, why, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))
        counted = key is not None and route.method == "POST"
        if key is not None and counted:
            key.enter(self._clock())
        self._live[exchange] = key
        try:
            if route.of_cluster and self.view.unready(self._clock()):
                await self._ask()  # a rank may have joined meanwhile
            await route.serve(exchange)
        finally:
            del self._live[exchange]
            if key is not None and counted:
                key.leave()

    async def _fail(self, exchange: Exchange, error: HttpError) -> None:
        self.counts.errors[error.code or str(error.status)] += 1
        if error.status >= 500:
            log.warning("request.failed", rid=exchange.rid, status=error.status, code=error.code, message=error.message)
        if exchange.gone or error.status == CLIENT_GONE:
            return
        if exchange.status:  # an answer has begun
            await exchange.event(answers.failed(error.body()), last=True)
        else:
            await exchange.fail(error)

    # --- answers ----------------------------------------------------------------------------------------------------

    async def _chat(self, exchange: Exchange) -> None:
        await self._answer(exchange, await jobs.chat(await exchange.body(), self.view, self._texts, self._config))

    async def _completions(self, exchange: Exchange) -> None:
        job = await jobs.completions(await exchange.body(), self.view, self._texts, self._config)
        await self._answer(exchange, job)

    async def _generate(self, exchange: Exchange) -> None:
        await self._answer(exchange, await jobs.generate(await exchange.body(), self.view, self._texts))

    async def _answer(self, exchange: Exchange, job: jobs.Job) -> None:
        if job.rid:
            exchange.use_rid(job.rid)
        count = job.n * len(job.prompts)
        traced, span = follow(
            exchange.headers, exchange.rid, exchange.path, job.model.name, exchange.began_at, self._spans
        )
        rid = exchange.draw_rid() if exchange.client_rid else exchange.rid
        requests = job.requests(rid, {**self._urgency(exchange), **self._session(exchange, job), **traced})
        if self.counts.in_flight + count > self._config.max_requests:
            raise HttpError(429, f"{self.counts.in_flight} answers are under way here", code="overloaded")
        if (key := self._live[exchange]) is not None:
            key.enter(self._clock(), count, begun=1)
        prompt_tokens = sum(map(len, job.prompts))
        self.counts.in_flight += count
        self.counts.prompt_tokens += prompt_tokens
        generation = Generation(self.counts, exchange.began_at, self._clock)
        exchange.watch(generation.cancel)
        charged: dict[int, bool] = {}  # submitted prompts; true: a rank ran one in an interrupted answer
        try:
            for index, (ids, options) in enumerate(requests):
                generation.add(await self._choice(job, index, ids, options))
                charged[index // job.n] = False
                if key is not None and not index % job.n:
                    key.charge(len(ids))
            if exchange.gone:
                raise Gone
            writer = job.writer(answers.Head(exchange.rid, job.model.name, prompt_tokens, *job.usage), count)
            if job.stream:
                await _stream(exchange, generation, writer)
            else:
                await self._complete(exchange, job, requests, generation, charged)
                await exchange.answer(200, writer.whole(generation.answers))
        finally:
            exchange.unwatch()
            generation.close()
            self.counts.in_flight -= count
            used = sum(len(answer.ids) for answer in generation.answers)
            if span is not None:
                span.prompt_tokens, span.output_tokens = prompt_tokens, used
                span.finish = tuple(answer.finish for answer in generation.answers if answer.finish)
                exchange.span = span
            if key is not None:
                key.leave(count - 1)
                key.charge(used)
                for choice in generation.choices:
                    charged[choice.answer.index // job.n] |= choice.ran
                for prompt, ran in charged.items():
                    if not ran:  # no rank ran it: refused, or the client left while it waited
                        key.charge(-len(job.prompts[prompt]))

    async def _complete(
        self, exchange: Exchange, job: jobs.Job, requests: list[tuple[list[int], Options]], generation: Generation,
        charged: dict[int, bool],
    ) -> None:  # fmt: skip
        """Wait for the end of all answers. One that is interrupted is asked for again: nothing of it was sent yet."""
        left = MAX_RESTARTS
        while await generation.more():
            try:
                for _ in generation.taken():
                    pass
            except Interrupted as error:
                if not left or exchange.gone:
                    raise
                left -= 1
                index = error.choice.answer.index
                charged[index // job.n] = True
                ids, options = requests[index]
                options["rid"] = f"{exchange.draw_rid()}-{index}"
                deadline_s = options["deadline_s"] + exchange.began_at - self._clock()
                again = options | Options(deadline_s=max(0.001, deadline_s))
                generation.replace(error.choice, await self._choice(job, index, ids, again))

    async def _choice(self, job: jobs.Job, index: int, ids: list[int], options: Options) -> Choice:
        """Submit the request of one answer, and return its choice."""
        stream = await self._client.generate_tokens(ids, **options)
        decoder = None
        if job.text is not None:
            skip = job.request.skip_special_tokens is not False
            decoder = job.text.decoder(ids[-BEFORE:], skip_special_tokens=skip)
        stops = StopFinder(job.stops, include=job.include_stop)
        answer = answers.Answer(index, len(ids), index % job.n == 0)
        if "logprobs" in options:
            text = job.text
            answer.likelihoods = Likelihoods(text.token, text.token_bytes) if text is not None else Likelihoods()
        stop_ids = frozenset(job.request.stop_token_ids or ())
        unseen = frozenset() if job.include_stop else stop_ids.union(job.end_ids)
        return Choice(answer, stream, decoder, stops, stop_ids, unseen, options.get("min_tokens", 0))

    def _urgency(self, exchange: Exchange) -> Options:
        """Return the options that headers give: deadline, SLOs, SLO class and priority. A key may give the class
        too."""
        names = ("x-request-deadline-s", "x-ttft-slo-s", "x-tpot-slo-s")
        deadline_s, ttft_slo_s, tpot_slo_s = (self._seconds(exchange, name) for name in names)
        key = self._live[exchange]
        slo_class = exchange.headers.get(b"x-slo-class", b"").decode("latin-1")
        if len(slo_class) > SLO_CLASS_MAX:
            raise invalid("x-slo-class", f"x-slo-class: a name of at most {SLO_CLASS_MAX} characters")
        most = self._config.max_time_s
        priority = exchange.number(b"x-request-priority") or 0
        if priority != int(priority) or abs(priority) > PRIORITY_MAX:
            why = f"x-request-priority: a whole number from {-PRIORITY_MAX} to {PRIORITY_MAX}"
            raise invalid("x-request-priority", why)
        return {
            "deadline_s": min(deadline_s or most, most),
            "priority": int(priority),
            "ttft_slo_s": min(ttft_slo_s or 0.0, most),
            "tpot_slo_s": min(tpot_slo_s or 0.0, most),
            "slo_class": slo_class or (key.slo_class if key is not None else ""),
        }

    def _session(self, exchange: Exchange, job: jobs.Job) -> Options:
        """Return the request's session: the header's, else the body's. Two API keys have no session in common."""
        given = exchange.headers.get(b"x-session-id", b"").decode("latin-1")
        session = fields.checked_session("x-session-id", given) or job.session
        if not session:
            return {}
        key = self._live[exchange]
        return {"session": session if key is None else f"{quote(key.name, safe='')}/{session}"}

    @staticmethod
    def _seconds(exchange: Exchange, name: str) -> float | None:
        seconds = exchange.number(name.encode())
        if seconds is not None and seconds <= 0:
            raise invalid(name, f"{name}: seconds, above 0")
        return seconds

    # --- text -------------------------------------------------------------------------------------------------------

    async def _tokenize(self, exchange: Exchange) -> None:
        request = fields.read(fields.Tokenize, await exchange.body())
        if (request.prompt is None) == (request.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        model = self.view.model(request.model)
        text = await self._texts.of(model.name)
        if request.messages is not None:
            special = request.add_special_tokens is True
            answer = request.add_generation_prompt is not False
            ids = await jobs.conversation(text, request.messages, answer, special)
        else:
            ids = await jobs.token_ids(text, request.prompt or "", request.add_special_tokens is not False)
        await exchange.answer(200, encode({"count": len(ids), "max_model_len": model.max_context, "tokens": ids}))

    async def _detokenize(self, exchange: Exchange) -> None:
        request = fields.read(fields.Detokenize, await exchange.body())
        if not all(0 <= id < 2**31 for id in request.tokens):
            raise invalid("tokens", "tokens: ids from 0 to 2147483647")
        text = await self._texts.of(self.view.model(request.model).name)
        skip = request.skip_special_tokens is not False
        decode = partial(text.decode, request.tokens, skip_special_tokens=skip)
        prompt = await jobs.off_loop(len(request.tokens), decode)
        await exchange.answer(200, encode({"prompt": prompt}))

    # --- what is served, and how it is ------------------------------------------------------------------------------

    async def _models(self, exchange: Exchange) -> None:
        await exchange.answer(
            200, encode({"object": "list", "data": [_card(model) for model in self.view.models.values()]})
        )

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix("/v1/models/")
        await exchange.answer(200, encode(_card(self.view.model(name or " "))))

    async def _load(self, exchange: Exchange) -> None:
        ranks = self.view.seen.ranks if self.view.seen is not None else ()
        await exchange.answer(
            200, encode({"ranks": [openapi.rank_row(rank) for rank in ranks if rank.state != "gone"]})
        )

    async def _health(self, exchange: Exchange) -> None:
        await exchange.answer(200, b"ok\n", b"text/plain; charset=utf-8")

    async def _version(self, exchange: Exchange) -> None:
        await exchange.answer(200, encode({"version": metadata.version("pdbus")}))

    async def _ready(self, exchange: Exchange) -> None:
        trouble = self.view.unready(self._clock())
        await exchange.answer(503 if trouble else 200, f"{trouble or 'ok'}\n".encode(), b"text/plain; charset=utf-8")

    async def _metrics(self, exchange: Exchange) -> None:
        write, kind = choose_encoder(exchange.headers.get(b"accept", b"").decode("latin-1"))
        await exchange.answer(200, write(self.counts.registry), kind.encode())

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer(200, openapi.document())

    async def _docs(self, exchange: Exchange) -> None:
        await self._file(exchange, pages.File(openapi.page(), pages.HTML))

    async def _home(self, exchange: Exchange) -> None:
        await self._file(exchange, pages.page("chat"))

    async def _asset(self, exchange: Exchange) -> None:
        if (file := pages.asset(exchange.path)) is not None:
            await self._file(exchange, file)

    async def _file(self, exchange: Exchange, file: pages.File) -> None:
        await exchange.answer(200, file.body, file.kind, pages.HEADERS)

    # --- the fleet --------------------------------------------------------------------------------------------------

    async def _fleet_page(self, exchange: Exchange) -> None:
        await self._fleet_for(exchange).page(exchange)

    async def _fleet_stream(self, exchange: Exchange) -> None:
        await self._fleet_for(exchange).stream(exchange)

    async def _fleet_rank(self, exchange: Exchange) -> None:
        await self._fleet_for(exchange).rank(exchange)

    async def _fleet_request(self, exchange: Exchange) -> None:
        await self._fleet_for(exchange).request(exchange)

    def _fleet_for(self, exchange: Exchange) -> Fleet:
        """Return the fleet. Raises HttpError: 404 where none is shown, 403 unless the request's key is an operator's;
        without API keys 421 for a name that is not this machine's."""
        if isinstance(self._fleet, str):
            raise HttpError(404, self._fleet, code="not_found")
        if self._keys is None:
            refuse_other_hosts(exchange, exposed=False)
        elif exchange.path != PAGE and ((key := self._live[exchange]) is None or not key.operator):
            raise HttpError(403, "the fleet is for keys with operator = true", code="forbidden")
        return self._fleet


async def _stream(exchange: Exchange, generation: Generation, writer: answers.Writer) -> None:
    """Write the events of an answer; those that come together are written together. The status is sent with the first
    event, so a request that fails before that gets the status of its error."""
    begun: set[int] = set()
    left = len(generation.choices)
    while await generation.more():
        events: list[bytes] = []
        try:
            for choice, text, last in generation.taken():
                answer = choice.answer
                if answer.index not in begun:
                    begun.add(answer.index)
                    events.append(writer.begin(answer))
                if text or not last:
                    events.append(writer.more(answer, text))
                if last:
                    events.append(writer.end(answer))
                    left -= 1
            if not left:
                events.append(writer.close(generation.answers))
        finally:  # also before a failure: the output that came first is written
            if data := b"".join(events):
                if not exchange.status:
                    await exchange.events()
                await exchange.event(data, last=not left)


def _card(model: ServedModel) -> dict[str, Any]:
    """Return a model in OpenAI's form, with vLLM's `max_model_len`."""
    card = {"id": model.name, "object": "model", "created": 0, "owned_by": "pdbus", "root": model.name, "parent": None}
    return {**card, "max_model_len": model.max_context}
