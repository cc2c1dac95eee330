"""Requests for answers, understood: the bodies of three endpoints become one `Job`, and a job the client's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bus.errors import ConfigError
from bus.runtime.logs import get_logger
from pdbus.client import Options, choices
from pdbus.edge import fields
from pdbus.edge.answers import ChatWriter, CompletionWriter, GenerateWriter, Head, Writer
from pdbus.edge.cluster import ServedModel, View
from pdbus.edge.errors import HttpError, invalid
from pdbus.edge.exchange import RID_MAX
from pdbus.text.models import ModelText, text_for

CHAT_TOKENS, COMPLETION_TOKENS, GENERATE_TOKENS = 1024, 16, 128  # of an answer whose length nobody says
AT_ONCE_CHARACTERS = 4096  # texts up to here are tokenized on the loop: less work than to hand them over

log = get_logger("edge")


@dataclass(slots=True)
class Job:
    """`prompts` times `n` answers. `text` is None where ids are all that can be had."""

    model: ServedModel
    text: ModelText | None
    prompts: list[list[int]]
    said: fields.Sampling
    options: Options
    max_tokens: int | None
    usual_tokens: int
    stream: bool
    writer: Callable[[Head, int], Writer]  # of so many answers
    n: int = 1
    stops: tuple[str, ...] = ()
    usage: tuple[bool, bool] = (False, False)  # in the last event of a stream; in every event
    include_stop: bool = False
    rooms: list[int] | None = None  # one for each prompt
    rid: str = ""  # where the body says one

    def __post_init__(self) -> None:
        self.n = fields.choices_of(self.said, len(self.prompts))
        self.stops = fields.stops_of(self.said)

    def requests(self, rid: str, urgency: Options) -> list[tuple[list[int], Options]]:
        """The prompt and the options of each answer."""
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
            most = self.max_tokens if self.max_tokens is not None else min(self.usual_tokens, room_left)
            for options in choices(self.n, **shared):
                options["rid"] = f"{rid}-{len(requests)}" if count > 1 else rid
                options["max_tokens"] = most
                if self.rooms is not None:
                    options["bootstrap_room"] = self.rooms[at]
                requests.append((ids, options))
        return requests

    def _stop_token_ids(self) -> list[int]:
        """With the model's own end tokens, so that the client library knows the end when it sees it."""
        asked = list(self.said.stop_token_ids or ())
        if self.text is None or self.said.ignore_eos:
            return asked
        return asked + [id for id in self.text.eos_ids if id not in asked][: fields.MAX_STOP_TOKEN_IDS - len(asked)]


class Texts:
    """Tokenizers and templates by model, each loaded once and on a thread. For one event loop."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = dict(folders)
        self._loading: dict[str, asyncio.Task[ModelText]] = {}

    def begin(self, model: str) -> asyncio.Task[ModelText]:
        """Load it, unless that was tried already."""
        task = self._loading.get(model)
        if task is None:
            task = self._loading[model] = asyncio.create_task(self._load(model))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # who asks is told
        return task

    async def of(self, model: str) -> ModelText:
        """HttpError when it cannot be had, after which it is tried again."""
        task = self.begin(model)
        if task.done():
            if task.exception() is None:
                return task.result()
            del self._loading[model]
            task = self.begin(model)
        return await asyncio.shield(task)

    async def _load(self, model: str) -> ModelText:
        try:
            return await asyncio.to_thread(text_for, model, self._folders)
        except ConfigError as error:
            log.error("tokenizer.missing", model=model, error=str(error))
            why = f"this edge has no tokenizer for {model!r}: send token ids to /generate"
            raise HttpError(501, why, code="no_tokenizer") from None


async def chat(body: bytes, view: View, texts: Texts) -> Job:
    said = fields.read(fields.Chat, body)
    model = view.model(said.model)
    text = await texts.of(model.name)
    ids = await conversation(text, said.messages, said.add_generation_prompt is not False)
    most = said.max_completion_tokens if said.max_completion_tokens is not None else said.max_tokens
    return _openai(said, model, text, [ids], most, CHAT_TOKENS, ChatWriter)


async def completions(body: bytes, view: View, texts: Texts) -> Job:
    said = fields.read(fields.Completion, body)
    model = view.model(said.model)
    text = await texts.of(model.name)
    ids = [await token_ids(text, prompt) for prompt in fields.prompts_of(said.prompt, "prompt")]
    return _openai(said, model, text, ids, said.max_tokens, COMPLETION_TOKENS, CompletionWriter)


def _openai(
    said: fields.Generation,
    model: ServedModel,
    text: ModelText,
    prompts: list[list[int]],
    max_tokens: int | None,
    usual_tokens: int,
    writer: Callable[[Head, int], Writer],
) -> Job:
    told = said.stream_options
    if told is not None and not said.stream:
        raise invalid("stream_options", "stream_options goes with stream")
    return Job(
        model, text, prompts, said, fields.options_of(said), max_tokens, usual_tokens, bool(said.stream), writer,
        usage=(told.include_usage, told.continuous_usage_stats) if told is not None else (False, False),
        include_stop=bool(said.include_stop_str_in_output),
    )  # fmt: skip


async def generate(body: bytes, view: View, texts: Texts) -> Job:
    said = fields.read(fields.Generate, body)
    if (said.text is None) == (said.input_ids is None):
        raise invalid("text", "give either text or input_ids")
    model = view.model(said.model)
    text: ModelText | None
    try:
        text = await texts.of(model.name)
    except HttpError:
        if said.text is not None:
            raise
        text = None  # ids go in and out all the same
    given, param = (said.text, "text") if said.text is not None else (said.input_ids, "input_ids")
    prompts = fields.prompts_of(given, param)
    sampling = said.sampling_params or fields.SglSampling()
    options = fields.options_of(sampling)
    if said.routed_dp_rank is not None:
        options["routed_dp_rank"] = said.routed_dp_rank
    if said.disagg_prefill_dp_rank is not None:
        options["disagg_prefill_dp_rank"] = said.disagg_prefill_dp_rank
    rooms = [said.bootstrap_room] if isinstance(said.bootstrap_room, int) else said.bootstrap_room
    if rooms is not None and (len(rooms) != len(prompts) or sampling.n not in (None, 1)):
        raise invalid("bootstrap_room", "bootstrap_room: one for each prompt, and one answer of each")
    rid = said.rid or ""
    if len(rid) > RID_MAX or not rid.isascii() or not rid.isprintable():
        raise invalid("rid", f"rid: 1 to {RID_MAX} printable characters")
    batch = given is not prompts[0] or (sampling.n or 1) > 1
    return Job(
        model, text, [await token_ids(text, prompt) for prompt in prompts], sampling, options,
        sampling.max_new_tokens, GENERATE_TOKENS, said.stream, lambda head, _: GenerateWriter(head, batch=batch),
        rooms=rooms, rid=rid,
    )  # fmt: skip


async def conversation(text: ModelText, messages: list[fields.Turn], answer: bool) -> list[int]:
    """The ids of `messages` in the model's template."""
    if not messages:
        raise invalid("messages", "messages is empty")
    turns = [(turn.role, fields.text_of(turn, at)) for at, turn in enumerate(messages)]
    ids: list[int] = await off_loop(sum(len(each) for _, each in turns), lambda: text.chat(turns, answer=answer))
    return ids


async def token_ids(text: ModelText | None, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    assert text is not None
    ids: list[int] = await off_loop(len(prompt), lambda: text.encode(prompt))
    return ids


async def off_loop(size: int, work: Callable[[], Any]) -> Any:
    """`work` on a text of `size` characters: on a thread where it would hold up everybody else."""
    return work() if size <= AT_ONCE_CHARACTERS else await asyncio.to_thread(work)
