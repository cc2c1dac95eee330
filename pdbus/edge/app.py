"""The edge as an ASGI application: endpoints, and what a request goes through on its way to the client library.

Owns the tables of live exchanges and loaded tokenizers; binds no port (see `server`), speaks to no rank itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec
from prometheus_client.exposition import choose_encoder

from bus.errors import BusError, ConfigError
from bus.runtime.logs import get_logger
from pdbus.client import AsyncClient, Options
from pdbus.edge import answers, fields, openapi
from pdbus.edge.cluster import ServedModel, View
from pdbus.edge.config import EdgeConfig
from pdbus.edge.errors import CLIENT_GONE, HttpError, invalid, of_bus
from pdbus.edge.exchange import Exchange, Receive, Scope, Send
from pdbus.edge.generation import Choice, Generation, Gone
from pdbus.edge.keys import Key, Keys
from pdbus.edge.metrics import Counts
from pdbus.edge.stops import StopFinder
from pdbus.edge.texts import ModelText, text_for

LOOK_S = 1.0  # between two looks at the cluster, the keys and who has stopped reading
CHAT_TOKENS, COMPLETION_TOKENS, GENERATE_TOKENS = 1024, 16, 128  # of an answer whose length nobody says
AT_ONCE_CHARACTERS = 4096  # texts up to here are tokenized on the loop: less work than to hand them over

log = get_logger("edge")
encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    serve: Callable[[Exchange], Awaitable[None]]
    open: bool = False  # to those without a key too


@dataclass(slots=True)
class Job:
    """A request for answers, understood: of whichever endpoint."""

    model: ServedModel
    text: ModelText | None
    prompts: list[list[int]]
    said: fields.Sampling
    options: Options
    max_tokens: int | None
    usual_tokens: int
    stream: bool
    include_usage: bool = False
    include_stop: bool = False
    rooms: list[int] | None = None  # one for each prompt


class Edge:
    """`await edge(scope, receive, send)`; `await edge.look()` each LOOK_S keeps it up to date."""

    def __init__(self, config: EdgeConfig, client: AsyncClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._client = client
        self._clock = clock
        self._keys = Keys(config.api_keys) if config.api_keys else None
        self._texts: dict[str, asyncio.Task[ModelText]] = {}
        self._live: dict[Exchange, Key | None] = {}
        self._page = resources.files("pdbus.edge").joinpath("page.html").read_bytes()
        self.counts = Counts()
        self.view = View()
        self._routes = {
            "/v1/chat/completions": Route("POST", self._chat),
            "/v1/completions": Route("POST", self._completions),
            "/generate": Route("POST", self._generate),
            "/tokenize": Route("POST", self._tokenize),
            "/detokenize": Route("POST", self._detokenize),
            "/v1/models": Route("GET", self._models),
            "/load": Route("GET", self._load),
            "/health": Route("GET", self._health, open=True),
            "/ready": Route("GET", self._ready, open=True),
            "/metrics": Route("GET", self._metrics, open=True),
            "/openapi.json": Route("GET", self._openapi, open=True),
            "/docs": Route("GET", self._docs, open=True),
            "/": Route("GET", self._home, open=True),
        }

    # --- from outside -----------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"an edge serves http, not {scope['type']}")
        exchange = Exchange(scope, receive, send, self._config, self._clock)
        try:
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
            self.counts.requests[exchange.path if exchange.path in self._routes else "other", str(status)] += 1

    async def look(self) -> None:
        """Ask the controller how the cluster is, read the keys again, end what nobody reads."""
        if self._keys is not None:
            self._keys.refresh()
        now = self._clock()
        for exchange in self._live:
            if exchange.overdue(now) and exchange.task is not None:
                log.warning("client.stopped_reading", rid=exchange.rid)
                exchange.task.cancel()
        try:
            self.view = View(await self._client.status(timeout_s=LOOK_S), self._clock())
        except BusError:
            return  # what was seen last grows old
        for name in self.view.models:
            self._text(name)

    # --- every request ----------------------------------------------------------------------------------------------

    async def _serve(self, exchange: Exchange) -> None:
        exchange.check()
        route = self._routes.get(exchange.path)
        if route is None and exchange.path.startswith("/v1/models/"):
            route = Route("GET", self._model)
        if route is None:
            raise HttpError(404, f"there is no {exchange.path[:200]}; see /docs", code="not_found")
        if exchange.method != route.method and (exchange.method, route.method) != ("HEAD", "GET"):
            allowed = ((b"allow", route.method.encode()),)
            raise HttpError(405, f"{exchange.path} takes {route.method}", code="method_not_allowed", headers=allowed)
        key = None
        if self._keys is not None and not route.open:
            key = self._keys.find(exchange.headers.get(b"authorization", b""))
            if key is None:
                why = "send a valid key, as in: Authorization: Bearer KEY"
                raise HttpError(401, why, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))
        self._live[exchange] = key
        try:
            await route.serve(exchange)
        finally:
            del self._live[exchange]

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
        said = fields.read(fields.Chat, await exchange.body())
        if not said.messages:
            raise invalid("messages", "messages is empty")
        turns = [(turn.role, fields.text_of(turn, at)) for at, turn in enumerate(said.messages)]
        model = self.view.model(said.model)
        text = await self._text(model.name)
        answer = said.add_generation_prompt is not False
        ids = await _off_loop(sum(len(each) for _, each in turns), lambda: text.chat(turns, answer=answer))
        most = said.max_completion_tokens if said.max_completion_tokens is not None else said.max_tokens
        job = self._job(model, text, [ids], said, most, CHAT_TOKENS)
        await self._answer(exchange, job, answers.ChatWriter)

    async def _completions(self, exchange: Exchange) -> None:
        said = fields.read(fields.Completion, await exchange.body())
        model = self.view.model(said.model)
        text = await self._text(model.name)
        ids = [await self._ids(text, prompt) for prompt in fields.prompts_of(said.prompt, "prompt")]
        job = self._job(model, text, ids, said, said.max_tokens, COMPLETION_TOKENS)
        await self._answer(exchange, job, answers.CompletionWriter)

    def _job(
        self,
        model: ServedModel,
        text: ModelText,
        ids: list[list[int]],
        said: fields.Generation,
        most: int | None,
        usual: int,
    ) -> Job:
        usage = bool(said.stream_options and said.stream_options.include_usage)
        if said.stream_options is not None and not said.stream:
            raise invalid("stream_options", "stream_options goes with stream")
        stop_too = bool(said.include_stop_str_in_output)
        return Job(model, text, ids, said, fields.options_of(said), most, usual, bool(said.stream), usage, stop_too)

    async def _generate(self, exchange: Exchange) -> None:
        said = fields.read(fields.Generate, await exchange.body())
        if (said.text is None) == (said.input_ids is None):
            raise invalid("text", "give either text or input_ids")
        model = self.view.model(said.model)
        text: ModelText | None
        try:
            text = await self._text(model.name)
        except HttpError:
            if said.text is not None:
                raise
            text = None  # ids go in and out all the same
        given, param = (said.text, "text") if said.text is not None else (said.input_ids, "input_ids")
        prompts = fields.prompts_of(given, param)
        ids = [await self._ids(text, prompt) for prompt in prompts]
        sampling = said.sampling_params or fields.SglSampling()
        options = fields.options_of(sampling)
        if said.routed_dp_rank is not None:
            options["routed_dp_rank"] = said.routed_dp_rank
        if said.disagg_prefill_dp_rank is not None:
            options["disagg_prefill_dp_rank"] = said.disagg_prefill_dp_rank
        rooms = [said.bootstrap_room] if isinstance(said.bootstrap_room, int) else said.bootstrap_room
        if rooms is not None and (len(rooms) != len(ids) or sampling.n not in (None, 1)):
            raise invalid("bootstrap_room", "bootstrap_room: one for each prompt, and one answer of each")
        if said.rid is not None:
            exchange.rid = said.rid
            if not 0 < len(said.rid) <= 120 or not said.rid.isascii() or not said.rid.isprintable():
                raise invalid("rid", "rid: 1 to 120 printable characters")
        job = Job(
            model, text, ids, sampling, options, sampling.max_new_tokens, GENERATE_TOKENS, said.stream, rooms=rooms
        )
        batch = not isinstance(given, str) and isinstance(given[0], str | list)  # type: ignore[index]
        batch |= (sampling.n or 1) > 1
        await self._answer(exchange, job, lambda head, _: answers.GenerateWriter(head, batch=batch))

    async def _answer(self, exchange: Exchange, job: Job, make: Callable[[answers.Head, int], answers.Writer]) -> None:
        key = self._live[exchange]
        n = fields.choices_of(job.said, len(job.prompts))
        count = n * len(job.prompts)
        if self.counts.in_flight + count > self._config.max_requests:
            raise HttpError(429, f"{self.counts.in_flight} answers are under way here", code="overloaded")
        plans = self._plans(exchange, job, n)
        if key is not None:
            key.enter(self._clock())
        prompt_tokens = sum(map(len, job.prompts))
        self.counts.in_flight += count
        self.counts.prompt_tokens += prompt_tokens
        choices: list[Choice] = []
        generation = Generation(choices, self.counts, exchange.began_at, self._clock)
        try:
            async with exchange.watched(generation.cancel):
                for index, (ids, options) in enumerate(plans):
                    stream = await self._client.generate_tokens(ids, **options)
                    decoder = job.text.decoder() if job.text is not None else None
                    stops = StopFinder(fields.stops_of(job.said), include=job.include_stop)
                    stop_ids = frozenset(job.said.stop_token_ids or ())
                    choices.append(Choice(answers.Answer(index, len(ids)), stream, decoder, stops, stop_ids))
                if exchange.gone:
                    raise Gone
                head = answers.Head(exchange.rid, job.model.name, prompt_tokens, job.include_usage)
                writer = make(head, count)
                if job.stream:
                    await _stream(exchange, generation, writer)
                else:
                    async for _ in generation:
                        pass
                    await exchange.answer(200, writer.whole(generation.answers))
        finally:
            generation.cancel()
            self.counts.in_flight -= count
            if key is not None:
                key.leave(prompt_tokens + sum(len(answer.ids) for answer in generation.answers))

    def _plans(self, exchange: Exchange, job: Job, n: int) -> list[tuple[list[int], Options]]:
        """The prompt and the options of each answer."""
        fields.stops_of(job.said)
        deadline_s = exchange.number(b"x-request-deadline-s")
        if deadline_s is not None and deadline_s <= 0:
            raise invalid("x-request-deadline-s", "x-request-deadline-s: seconds, above 0")
        priority = exchange.number(b"x-request-priority") or 0.0
        shared: Options = {
            **job.options,
            "model": job.model.name,
            "leg": job.model.leg,
            "block_tokens": job.model.block_tokens,
            "deadline_s": min(deadline_s or self._config.max_time_s, self._config.max_time_s),
            "priority": int(priority),
        }
        stop_ids = list(job.options.get("stop_token_ids", ()))
        if job.text is not None and not job.options.get(
            "ignore_eos"
        ):  # so that the client knows the end when it sees it
            stop_ids += [id for id in job.text.eos_ids if id not in stop_ids][
                : fields.MAX_STOP_TOKEN_IDS - len(stop_ids)
            ]
        shared["stop_token_ids"] = stop_ids
        plans: list[tuple[list[int], Options]] = []
        for at, ids in enumerate(job.prompts):
            room_left = max(1, job.model.max_context - len(ids))
            for number in range(n):
                options: Options = {**shared, "rid": exchange.rid}
                if n * len(job.prompts) > 1:
                    options["rid"] = f"{exchange.rid}-{len(plans)}"
                if job.rooms is not None:
                    options["bootstrap_room"] = job.rooms[at]
                if "seed" in options:  # the same for all would make them all the same
                    options["seed"] += number
                options["max_tokens"] = (
                    job.max_tokens if job.max_tokens is not None else min(job.usual_tokens, room_left)
                )
                plans.append((ids, options))
        return plans

    # --- text -------------------------------------------------------------------------------------------------------

    async def _tokenize(self, exchange: Exchange) -> None:
        said = fields.read(fields.Tokenize, await exchange.body())
        if (said.prompt is None) == (said.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        model = self.view.model(said.model)
        text = await self._text(model.name)
        if said.messages is not None:
            turns = [(turn.role, fields.text_of(turn, at)) for at, turn in enumerate(said.messages)]
            size = sum(len(each) for _, each in turns)
            ids = await _off_loop(size, lambda: text.chat(turns, answer=said.add_generation_prompt))
        else:
            ids = await self._ids(text, said.prompt or "")
        await exchange.answer(200, encode({"count": len(ids), "max_model_len": model.max_context, "tokens": ids}))

    async def _detokenize(self, exchange: Exchange) -> None:
        said = fields.read(fields.Detokenize, await exchange.body())
        if not all(0 <= id < 2**31 for id in said.tokens):
            raise invalid("tokens", "tokens: ids from 0 to 2147483647")
        text = await self._text(self.view.model(said.model).name)
        prompt = await _off_loop(len(said.tokens), lambda: text.decode(said.tokens))
        await exchange.answer(200, encode({"prompt": prompt}))

    async def _ids(self, text: ModelText | None, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        assert text is not None
        ids: list[int] = await _off_loop(len(prompt), lambda: text.encode(prompt))
        return ids

    def _text(self, model: str) -> Awaitable[ModelText]:
        """Loaded once, on a thread. HttpError when it cannot be had, after which it is tried again."""
        task = self._texts.get(model)
        if task is None or (task.done() and task.exception() is not None):
            task = self._texts[model] = asyncio.create_task(self._load_text(model))
            task.add_done_callback(lambda done: done.exception())
        return asyncio.shield(task)

    async def _load_text(self, model: str) -> ModelText:
        try:
            return await asyncio.to_thread(text_for, model, dict(self._config.tokenizers))
        except ConfigError as error:
            log.error("tokenizer.missing", model=model, error=str(error))
            why = f"this edge has no tokenizer for {model!r}: send token ids to /generate"
            raise HttpError(501, why, code="no_tokenizer") from None

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

    async def _ready(self, exchange: Exchange) -> None:
        trouble = self.view.unready(self._clock())
        await exchange.answer(503 if trouble else 200, f"{trouble or 'ok'}\n".encode(), b"text/plain; charset=utf-8")

    async def _metrics(self, exchange: Exchange) -> None:
        write, kind = choose_encoder(exchange.headers.get(b"accept", b"").decode("latin-1"))
        await exchange.answer(200, write(self.counts.registry), kind.encode())

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer(200, openapi.document())

    async def _docs(self, exchange: Exchange) -> None:
        await exchange.answer(200, openapi.page(), b"text/html; charset=utf-8")

    async def _home(self, exchange: Exchange) -> None:
        await exchange.answer(200, self._page, b"text/html; charset=utf-8")


async def _stream(exchange: Exchange, generation: Generation, writer: answers.Writer) -> None:
    """The status is sent with the first event: a request that fails before it gets the status that it deserves."""
    begun: set[int] = set()
    async for choice, text in generation:
        answer = choice.answer
        data = b""
        if answer.index not in begun:
            begun.add(answer.index)
            data = writer.begin(answer)
            if not exchange.status:
                await exchange.events()
        if text:
            data += writer.more(answer, text)
        if answer.result is not None:
            data += writer.end(answer)
        if data:
            await exchange.event(data)
    await exchange.event(writer.close(generation.answers), last=True)


async def _off_loop(size: int, work: Callable[[], Any]) -> Any:
    """`work` on a text of `size` characters: on a thread where it would hold up everybody else."""
    return work() if size <= AT_ONCE_CHARACTERS else await asyncio.to_thread(work)


def _card(model: ServedModel) -> dict[str, Any]:
    """As OpenAI lists a model, with vLLM's `max_model_len`."""
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "pdbus", "max_model_len": model.max_context}
