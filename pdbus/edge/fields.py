"""The fields of a request to each endpoint, and those that are refused by name. Pure.

A sampling parameter is supported when `Sampling` has a field with the name of the client's option; it is then passed on
under that name. Otherwise it is in `refused.REFUSED`. A field that is in neither is refused as unknown: no field is
ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct

from pdbus.client import Options
from pdbus.edge.errors import HttpError, invalid
from pdbus.edge.exchange import RID_MAX
from pdbus.edge.refused import (
    FRONT,
    OF_AGENTS,
    REFUSED,
    REFUSED_BY_GENERATE,
    REFUSED_BY_OPENAI,
    REFUSED_BY_TOKENIZE,
)

MAX_CHOICES = 128  # answers of one HTTP request: prompts times n
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20  # the protocol's limit
MAX_STOP_TOKEN_IDS = 64  # the protocol's limit
SESSION_MAX = 128  # characters: the name of an API key may stand before them in a submit
_T = TypeVar("_T")


class StreamOptions(Struct, forbid_unknown_fields=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: with include_usage, in every event
    include_obfuscation: bool | None = None  # OpenAI's padding; there is none here


class Sampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters of all endpoints."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 or -1: off
    seed: int | None = None  # -1: none
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool | None = None


class Schema(Struct, forbid_unknown_fields=True):
    """A JSON schema in OpenAI's form. Ranks that support schemas always enforce them."""

    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class OpenAiFields(Sampling, kw_only=True):
    """The fields that OpenAI's two endpoints share."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None  # add those that the tokenizer puts around a text
    user: str | None = None  # accepted without effect, as the next
    safety_identifier: str | None = None
    session_id: str | None = None  # vLLM's name for the request's session
    prompt_cache_key: str | None = None  # OpenAI's, where there is no other
    request_id: str | None = None  # vLLM's name for the request's id
    rid: str | None = None  # SGLang's name for it
    bootstrap_room: int | None = None
    routed_dp_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None


class Part(Struct, forbid_unknown_fields=True):
    """A part of a message's content; only text is supported."""

    type: str
    text: str
    cache_control: dict[str, Any] | None = None  # a hint; prefixes are always cached


class Turn(Struct, forbid_unknown_fields=True):
    """One message of a conversation. The fields that must be null are sent back by OpenAI's own package."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None  # of the speaker, for templates that use it
    refusal: None = None
    audio: None = None
    annotations: list[None] | None = None
    function_call: None = None
    tool_calls: list[None] | None = None
    reasoning: None = None
    reasoning_content: None = None
    cache_control: dict[str, Any] | None = None


class Chat(OpenAiFields, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[Turn]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class Completion(OpenAiFields, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


class SglSampling(Sampling, kw_only=True):
    """The `sampling_params` of SGLang's `/generate`."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None  # SGLang's name for min_tokens
    sampling_seed: int | None = None  # SGLang's name for seed
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class Generate(Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's `/generate`. In a batch a placement may be a list or one value for all; rooms must be a list."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SglSampling | None = None
    stream: bool = False
    rid: str | None = None
    model: str | None = None
    bootstrap_room: int | list[int] | None = None
    routed_dp_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None


class Tokenize(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `/tokenize`: a text, or a conversation in the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Turn] | None = None
    add_generation_prompt: bool | None = None  # default: true
    add_special_tokens: bool | None = None  # default: true for a text, false for a conversation


class Detokenize(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/detokenize`: token ids whose text is wanted."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None  # default: true


def _with_refused(kind: type[_T], refused: dict[str, tuple[object, ...]]) -> type[_T]:
    """Return `kind` with the `refused` fields added at the end, so that `read` can distinguish them from unknown
    ones."""
    assert not set(refused) & set(kind.__struct_fields__), "a field is supported or refused"  # type: ignore[attr-defined]
    fields: list[Any] = [(name, Any, UNSET) for name in refused]
    return msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True)  # type: ignore[return-value]


_SglSampling = _with_refused(SglSampling, REFUSED)


class _Generate(Generate, kw_only=True):
    sampling_params: _SglSampling | None = None  # type: ignore[valid-type]


_DECODERS: dict[type, Any] = {
    Chat: msgspec.json.Decoder(_with_refused(Chat, REFUSED_BY_OPENAI)),
    Completion: msgspec.json.Decoder(_with_refused(Completion, REFUSED_BY_OPENAI)),
    Generate: msgspec.json.Decoder(_with_refused(_Generate, REFUSED_BY_GENERATE)),
    Tokenize: msgspec.json.Decoder(_with_refused(Tokenize, REFUSED_BY_TOKENIZE)),
    Detokenize: msgspec.json.Decoder(Detokenize),
}


def read(kind: type[_T], body: bytes) -> _T:
    """Return the request of `kind` (Chat, Completion, Generate, Tokenize or Detokenize) in the JSON `body`. Raises
    HttpError 400 that names the field at fault, also for a field that is unknown or refused."""
    try:
        request = _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(None, f"the body is not JSON: {error}") from None
    if kind in (Chat, Completion):
        _refuse(request, REFUSED_BY_OPENAI, "")
    elif kind is Tokenize:
        _refuse(request, REFUSED_BY_TOKENIZE, "")
    elif kind is Generate:
        _refuse(request, REFUSED_BY_GENERATE, "")
        if request.sampling_params is not None:
            _refuse(request.sampling_params, REFUSED, "sampling_params.")
    return request  # type: ignore[no-any-return]


def _refuse(request: Any, table: dict[str, tuple[object, ...]], path: str) -> None:
    values = msgspec.structs.astuple(request)[-len(table) :]  # the refused fields are the last ones
    if values.count(UNSET) == len(table):
        return
    for name, value in zip(request.__struct_fields__[-len(table) :], values, strict=True):
        if value is not UNSET and value not in table[name]:
            raise _unsupported(f"{path}{name}", name in OF_AGENTS)


def _wrong(reason: str) -> HttpError:
    """Return the error for a message of msgspec, such as: Expected `int`, got `str` - at `$.max_tokens`."""
    what, _, path = reason.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if what.startswith("Object contains unknown field `"):
        name = what.split("`")[1]
        path = f"{path}.{name}" if path else name
        return _unsupported(path)
    if what.startswith("Object missing required field `"):
        name = what.split("`")[1]
        path = f"{path}.{name}" if path else name
        return invalid(path, f"{path} is missing", "missing_required_parameter")
    message, _, field = path.partition(".")  # no field where the message itself is none
    if message.startswith("messages[") and field.partition(".")[0].partition("[")[0] in OF_AGENTS:
        return _unsupported(path, of_agents=True)
    return invalid(path or None, f"{path}: {what[0].lower()}{what[1:]}" if path else what)


def _unsupported(path: str, of_agents: bool = False) -> HttpError:
    instead = FRONT if of_agents else "leave it out"
    return invalid(path, f"{path} is not supported here; {instead}", "unsupported_parameter")


def _passed(kind: type[Sampling]) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Return the fields of `kind` that become client options of the same name, and a function that gets their
    values."""
    others = {"model", "max_tokens", "stop_token_ids"}
    names = tuple(name for name in kind.__struct_fields__ if name in Options.__annotations__ and name not in others)
    return names, attrgetter(*names)


_OF_OPENAI, _OF_GENERATE = _passed(OpenAiFields), _passed(SglSampling)


def options_of(request: Sampling, defaults: Mapping[str, float] | None = None) -> Options:
    """Return the client library's sampling options for `request`, with `defaults` for those that it leaves out (after
    them, OpenAI's 1 for `temperature`). Raises HttpError 400 for values that contradict one another or exceed a
    limit."""
    names, values_of = _OF_GENERATE if isinstance(request, SglSampling) else _OF_OPENAI
    asked = zip(names, values_of(request), strict=True)
    options: dict[str, Any] = {name: value for name, value in asked if value is not None}
    if isinstance(request, SglSampling):
        _same(options, "min_tokens", "min_new_tokens", request.min_new_tokens)
        _same(options, "seed", "sampling_seed", request.sampling_seed)
    if options.get("seed") == -1:
        del options["seed"]
    if defaults:
        options = {**defaults, **options}
    options.setdefault("temperature", 1.0)
    if options.get("top_k") == -1:
        options["top_k"] = 0
    if schema := _schema_of(getattr(request, "response_format", None)):
        options["json_schema"] = schema
    if (logprobs := _logprobs_of(request)) is not None:
        options["logprobs"] = logprobs
    if request.stop_token_ids:
        options["stop_token_ids"] = request.stop_token_ids
    return options  # type: ignore[return-value]


def _same(options: dict[str, Any], name: str, theirs: str, value: int | None) -> None:
    """Set an option that has two names in a request. Raises HttpError when their values differ."""
    if value is not None and options.setdefault(name, value) != value:
        raise invalid(theirs, f"{theirs} and {name} are two names of one field, and their values differ")


def _schema_of(form: ResponseFormat | None) -> str:
    """Return the JSON schema for the answer; empty: none."""
    if form is None or form.type == "text":
        return ""
    if form.type == "json_object":
        return '{"type":"object"}'
    if form.json_schema is None:
        raise invalid("response_format.json_schema", "response_format.json_schema is missing")
    return msgspec.json.encode(form.json_schema.schema).decode()


def _logprobs_of(request: Sampling) -> int | None:
    """Return how many most likely tokens get log probabilities beside the output's own; None: no log probabilities."""
    if isinstance(request, Chat):
        name, top = "top_logprobs", request.top_logprobs or (0 if request.logprobs else None)
        if top and not request.logprobs:
            raise invalid(name, "top_logprobs goes with logprobs")
    else:
        name, top = "logprobs", getattr(request, "logprobs", None)
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise invalid(name, f"{name}: from 0 to {MAX_TOP_LOGPROBS}, not {top}")
    return top


def stops_of(request: Sampling) -> tuple[str, ...]:
    """Return the request's stop strings; empty: none. Raises HttpError 400 for too many, or an empty one."""
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if not all(stops) or len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop: at most {MAX_STOPS} strings, none of them empty")
    return stops


def choices_of(request: Sampling, prompts: int) -> int:
    """Return the number of answers for each of `prompts` prompts. Raises HttpError 400 for too many, or for several
    with one room (SGLang's number of a request)."""
    n = 1 if request.n is None else request.n
    if n < 1 or n * prompts > MAX_CHOICES:
        raise invalid("n", f"n: from 1 on, and at most {MAX_CHOICES} answers in all, not {n} for each of {prompts}")
    if n * prompts > 1 and getattr(request, "bootstrap_room", None) is not None:
        raise invalid("bootstrap_room", "bootstrap_room: a room is one request's; ask for one answer")
    return n


def session_of(request: Sampling) -> str:
    """Return the session of the body; empty without one."""
    for name in ("session_id", "prompt_cache_key"):
        session: str | None = getattr(request, name, None)
        if session:
            return checked_session(name, session)
    return ""


def checked_session(name: str, session: str) -> str:
    """Return `session`. Raises HttpError when it is too long."""
    if len(session) > SESSION_MAX:
        raise invalid(name, f"{name}: {SESSION_MAX} characters at most")
    return session


def rid_of(request: OpenAiFields | Generate) -> str:
    """Return the request id of the body; empty without one. Raises HttpError 400 for an invalid one, or for two
    different ones."""
    named = {name: rid for name in ("rid", "request_id") if (rid := getattr(request, name, None))}
    for name, rid in named.items():
        if len(rid) > RID_MAX or not rid.isascii() or not rid.isprintable():
            raise invalid(name, f"{name}: 1 to {RID_MAX} printable characters")
    if len(set(named.values())) > 1:
        raise invalid("rid", "rid and request_id are two names of one field, and their values differ")
    return next(iter(named.values()), "")


def message_of(turn: Turn, at: int) -> dict[str, str]:
    """Return message number `at` of a conversation in the form of chat templates: `role`, `content`, maybe `name`. Text
    parts are joined without separators. Raises HttpError 400 for a role or part that is not supported."""
    message = {"role": turn.role, "content": _content(turn, at)}
    return message | {"name": turn.name} if turn.name else message


def _content(turn: Turn, at: int) -> str:
    if turn.role not in ("system", "developer", "user", "assistant"):
        why = f"messages[{at}].role: {turn.role[:40]!r} is not supported"
        raise invalid(f"messages[{at}].role", f"{why}; {FRONT}" if turn.role in OF_AGENTS else why)
    if turn.content is None:
        raise invalid(f"messages[{at}].content", f"messages[{at}].content is missing")
    if isinstance(turn.content, str):
        return turn.content
    for number, part in enumerate(turn.content):
        if part.type != "text":
            path = f"messages[{at}].content[{number}].type"
            raise invalid(path, f"{path}: {part.type[:40]!r} is not supported, text alone is")
    return "".join(part.text for part in turn.content)


def prompts_of(prompt: str | list[Any] | None, param: str) -> list[str | list[int]]:
    """Return the prompts, each a text or a list of ids, from the four forms that the field may have: a text, texts,
    ids, lists of ids. Raises HttpError 400 for anything else, naming `param`."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid(param, f"{param} is empty")
    if isinstance(prompt[0], int):  # the other elements are checked when they are packed
        return [prompt]
    kinds = {type(each) for each in prompt}
    if kinds in ({str}, {list}):
        return prompt
    raise invalid(param, f"{param}: a text, a list of texts, a list of token ids, or a list of such lists")
