"""Requests for answers at the edge: the body of one of three endpoints becomes a `Job`, and a job becomes requests for
the client library. Sends none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bus.errors import ConfigError
from bus.runtime.logs import get_logger
from pdbus.client import Options, choices
from pdbus.edge import fields
from pdbus.edge.answers import ChatWriter, CompletionWriter, GenerateWriter, Head, Writer
from pdbus.edge.cluster import ServedModel, View
from pdbus.edge.config import EdgeConfig
from pdbus.edge.errors import OPENAI_CODES, HttpError, invalid
from pdbus.text.find import Places
from pdbus.text.models import ModelText, text_for

COMPLETION_TOKENS, GENERATE_TOKENS = 16, 128  # for requests without a maximum
MESSAGE_CHARACTERS = 64  # the cost of a message or part beside its text, in characters
AT_ONCE_CHARACTERS = 4096  # shorter texts are tokenized on the loop, which costs less than another thread

log = get_logger("edge")


@dataclass(slots=True)
class Job:
    """A request for `n` answers to each of `prompts` (token ids). `text` is None without a tokenizer; `max_tokens`
    None: `usual_tokens`. Raises HttpError 400 for a prompt that is too long, too many answers, or invalid stop
    strings."""

    model: ServedModel
    text: ModelText | None
    prompts: list[list[int]]
    request: fields.Sampling
    options: Options
    max_tokens: int | None
    usual_tokens: int  # used where `max_tokens` is None; 0: what fits
    stream: bool
    writer: Callable[[Head, int], Writer]  # for a number of answers
    n: int = 1
    stops: tuple[str, ...] = ()
    usage: tuple[bool, bool] = (False, False)  # usage in the last event of a stream; in every event
    include_stop: bool = False
    rooms: list[int] | None = None  # one for each prompt
    rid: str = ""  # of the body; empty: none
    session: str = ""  # of the body; empty: none

    def __post_init__(self) -> None:
        for ids in self.prompts:
            check_length(self.model, len(ids))
        self.n = fields.choices_of(self.request, len(self.prompts))
        self.stops = fields.stops_of(self.request)
        if self.stops and self.text is None:
            raise invalid("stop", "stop: without a tokenizer nothing is found in texts; name stop_token_ids")

    def requests(self, rid: str, urgency: Options) -> list[tuple[list[int], Options]]:
        """Return the prompt and the client's options for each answer, the answers of one prompt after each other. With
        several, rids are `rid` with -0, -1, ...; `urgency` are options that override the body's."""
        shared: Options = {
            **self.options,
            "model": self.model.name,
            "leg": self.model.leg,
            "block_tokens": self.model.block_tokens,
            **urgency,
            "stop_token_ids": self._stop_token_ids(),
        }
        count = self.n * len(self.prompts)
        requests: list[tuple[list[int], Options]] = []
        for at, ids in enumerate(self.prompts):
            room_left = max(1, self.model.max_context - len(ids))
            most = self.max_tokens if self.max_tokens is not None else min(self.usual_tokens or room_left, room_left)
            for options in choices(self.n, **shared):
                options["rid"] = f"{rid}-{len(requests)}" if count > 1 else rid
                options["max_tokens"] = most
                if self.rooms is not None:
                    options["bootstrap_room"] = self.rooms[at]
                requests.append((ids, options))
        return requests

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The model's own tokens that end an answer."""
        return () if self.text is None or self.request.ignore_eos else self.text.eos_ids

    def _stop_token_ids(self) -> list[int]:
        """Return the stop tokens, with the model's own end tokens, so that the client library recognises the end."""
        asked = list(self.request.stop_token_ids or ())
        return asked + [id for id in self.end_ids if id not in asked][: fields.MAX_STOP_TOKEN_IDS - len(asked)]


class TextLoader:
    """Loads tokenizers and templates by model, each once and on a thread. For one event loop. `places` gives tokenizers
    by model; others are the models' own files."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._loading: dict[str, asyncio.Task[ModelText]] = {}

    def begin(self, model: str) -> asyncio.Task[ModelText]:
        """Start to load `model` in the background, unless that was tried already; return the task."""
        task = self._loading.get(model)
        if task is None:
            task = self._loading[model] = asyncio.create_task(self._load(model))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # `of` raises it
        return task

    async def of(self, model: str) -> ModelText:
        """Return the text of `model`, waiting until it is loaded. Raises HttpError 501 when it cannot be loaded; the
        next call tries again."""
        task = self.begin(model)
        if task.done():
            if task.exception() is None:
                return task.result()
            del self._loading[model]
            task = self.begin(model)
        return await asyncio.shield(task)

    async def _load(self, model: str) -> ModelText:
        try:
            return await asyncio.to_thread(text_for, model, self._places)
        except ConfigError as error:
            log.error("tokenizer.missing", model=model, error=str(error))
            why = f"this edge has no tokenizer for {model!r}: send token ids, or start it with --tokenizer DIR"
            raise HttpError(501, why, code="no_tokenizer") from None


async def chat(body: bytes, view: View, texts: TextLoader, config: EdgeConfig) -> Job:
    """Return the job of a body of `/v1/chat/completions`. Waits for the tokenizer. Raises HttpError for an invalid body
    or model."""
    request = fields.read(fields.Chat, body)
    model = view.model(request.model)
    text = await texts.of(model.name)
    answer = request.add_generation_prompt is not False
    ids = await conversation(text, request.messages, answer, request.add_special_tokens is True, model)
    most = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    usual = config.chat_max_tokens or text.max_new_tokens
    return _openai(request, model, text, [ids], most, usual, ChatWriter, config)


async def completions(body: bytes, view: View, texts: TextLoader, config: EdgeConfig) -> Job:
    """Return the job of a body of `/v1/completions`, as `chat` does."""
    request = fields.read(fields.Completion, body)
    model = view.model(request.model)
    prompts = fields.prompts_of(request.prompt, "prompt")
    text = await _text_of(texts, model, prompts)
    ids = [await token_ids(text, prompt, request.add_special_tokens is not False, model) for prompt in prompts]
    return _openai(request, model, text, ids, request.max_tokens, COMPLETION_TOKENS, CompletionWriter, config)


def _openai(
    request: fields.OpenAiFields,
    model: ServedModel,
    text: ModelText | None,
    prompts: list[list[int]],
    max_tokens: int | None,
    usual_tokens: int,
    writer: Callable[[Head, int], Writer],
    config: EdgeConfig,
) -> Job:
    asked = request.stream_options
    if asked is not None and not request.stream:
        raise invalid("stream_options", "stream_options goes with stream")
    defaults = text.sampling if text is not None and config.sampling_defaults == "model" else None
    return Job(
        model, text, prompts, request, fields.options_of(request, defaults), max_tokens, usual_tokens,
        bool(request.stream), writer,
        usage=(asked.include_usage, asked.continuous_usage_stats) if asked is not None else (False, False),
        include_stop=bool(request.include_stop_str_in_output), rid=fields.rid_of(request),
        session=fields.session_of(request),
    )  # fmt: skip


async def generate(body: bytes, view: View, texts: TextLoader) -> Job:
    """Return the job of a body of SGLang's `/generate`, as `chat` does."""
    request = fields.read(fields.Generate, body)
    if (request.text is None) == (request.input_ids is None):
        raise invalid("text", "give either text or input_ids")
    model = view.model(request.model)
    given, param = (request.text, "text") if request.text is not None else (request.input_ids, "input_ids")
    prompts = fields.prompts_of(given, param)
    text = await _text_of(texts, model, prompts)
    sampling = request.sampling_params or fields.SglSampling()
    options = fields.options_of(sampling)
    if request.routed_dp_rank is not None:
        options["routed_dp_rank"] = request.routed_dp_rank
    if request.disagg_prefill_dp_rank is not None:
        options["disagg_prefill_dp_rank"] = request.disagg_prefill_dp_rank
    rooms = [request.bootstrap_room] if isinstance(request.bootstrap_room, int) else request.bootstrap_room
    if rooms is not None and (len(rooms) != len(prompts) or sampling.n not in (None, 1)):
        raise invalid("bootstrap_room", "bootstrap_room: one for each prompt, and one answer of each")
    batch = given is not prompts[0] or (sampling.n or 1) > 1
    return Job(
        model, text, [await token_ids(text, prompt, model=model) for prompt in prompts], sampling, options,
        sampling.max_new_tokens, GENERATE_TOKENS, request.stream, lambda head, _: GenerateWriter(head, batch=batch),
        rooms=rooms, rid=fields.rid_of(request),
    )  # fmt: skip


async def _text_of(texts: TextLoader, model: ServedModel, prompts: list[str | list[int]]) -> ModelText | None:
    """Return the model's text; None without a tokenizer if all prompts are ids, which need none."""
    try:
        return await texts.of(model.name)
    except HttpError:
        if any(isinstance(prompt, str) for prompt in prompts):
            raise
        return None


async def conversation(
    text: ModelText, messages: list[fields.Turn], answer: bool, add_special_tokens: bool = False,
    model: ServedModel | None = None,
) -> list[int]:  # fmt: skip
    """Return the ids of `messages` in the model's template; with `answer`, they end where the assistant's answer
    begins. Raises HttpError 400 for messages that the template refuses and, with `model`, where they are certainly too
    long for it."""
    if not messages:
        raise invalid("messages", "messages is empty")
    parts = sum(len(turn.content) if isinstance(turn.content, list) else 1 for turn in messages)
    work = MESSAGE_CHARACTERS * (len(messages) + parts)
    listed: list[Any] = await off_loop(work, lambda: [fields.message_of(turn, at) for at, turn in enumerate(messages)])
    size = sum(len(each["content"]) for each in listed)
    _check_text(text, size, model)

    def fill() -> list[int]:
        try:
            return text.chat(listed, answer=answer, add_special_tokens=add_special_tokens)
        except ConfigError as error:
            raise invalid("messages", f"messages: {error}") from None

    ids: list[int] = await off_loop(size + work, fill)
    return ids


async def token_ids(
    text: ModelText | None, prompt: str | list[int], add_special_tokens: bool = True, model: ServedModel | None = None
) -> list[int]:
    """Return the ids of `prompt` (ids stay as they are). Raises HttpError 400 with `model`, where a text is certainly
    too long for it."""
    if not isinstance(prompt, str):
        return prompt
    assert text is not None
    _check_text(text, len(prompt), model)
    ids: list[int] = await off_loop(len(prompt), lambda: text.encode(prompt, add_special_tokens=add_special_tokens))
    return ids


def check_length(model: ServedModel, tokens: int) -> None:
    """Raise HttpError 400 for a prompt that is too long for every rank of the model, before it is hashed and sent."""
    if 0 < model.max_context < tokens:
        why = f"the prompt has {tokens} tokens or more, and {model.name!r} takes {model.max_context} with the answer"
        raise invalid(None, why, OPENAI_CODES["too_long"])


def _check_text(text: ModelText, characters: int, model: ServedModel | None) -> None:
    if model is not None and text.longest_token:
        check_length(model, characters // text.longest_token)


async def off_loop(size: int, work: Callable[[], Any]) -> Any:
    """Run `work` on a text of `size` characters and return its result: at once if it is short, otherwise on a thread,
    so that other requests go on."""
    return work() if size <= AT_ONCE_CHARACTERS else await asyncio.to_thread(work)
