"""The fields of vLLM's requests: each becomes an option of the client library, is work of vLLM's server, or is refused
by name.

Pure, and it imports no vLLM: it reads attributes. A field that stands in no table is refused where it asks for
something, so a newer vLLM drops nothing either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pdbus.client import Options

LOGPROBS_MAX = 20
PRIORITY_MAX = 1000
RID_MAX = 128

# `SamplingParams`: the fields that become options.
MAPPED = frozenset((
    "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "logit_bias", "structured_outputs",
    "prompt_logprobs", "_bad_words_token_ids", "allowed_token_ids", "thinking_token_budget",
))  # fmt: skip
# The fields that vLLM's server sees to itself: several answers are as many requests, stop strings are found in its
# text, and the rest says how it makes text and events of token ids.
OF_THE_SERVER = frozenset((
    "n", "stop", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "flat_logprobs", "_eos_token_id",
    "_all_stop_token_ids", "_watermarking_skipped", "bad_words",
))  # fmt: skip
# The fields that no rank can carry, by the name that a client knows.
REFUSED = {
    "prompt_logprob_token_ids": "prompt_logprob_token_ids",
    "prompt_logprob_start": "prompt_logprob_start",
    "logprob_token_ids": "logprob_token_ids",
    "extra_args": "vllm_xargs",  # but for the session, which vLLM reads there too
    "repetition_detection": "repetition_detection",
    "skip_reading_prefix_cache": "skip_reading_prefix_cache",  # but with prompt_logprobs, as vLLM sets it
    "routed_experts_prompt_start": "routed_experts_prompt_start",
    "trace_decode_token_ids": "trace_decode_token_ids",
    "watermarking": "watermarking",
}

ZERO_IS_NOTHING = frozenset(("routed_experts_prompt_start",))
TAKEN = MAPPED | OF_THE_SERVER

# `EngineCoreRequest`, in the same way.
REQUEST_MAPPED = frozenset((
    "request_id", "prompt_token_ids", "sampling_params", "data_parallel_rank", "priority", "trace_headers",
    "cache_salt", "session_id", "reasoning_ended", "reasoning_parser_kwargs",
))  # fmt: skip
REQUEST_OF_THE_SERVER = frozenset((
    "arrival_time", "client_index", "current_wave", "external_req_id",
))  # fmt: skip
REQUEST_TAKEN = REQUEST_MAPPED | REQUEST_OF_THE_SERVER
REQUEST_REFUSED = {
    "mm_features": "images, audio and video",
    "pooling_params": "pooling",
    "lora_request": "LoRA adapters",
    "prompt_embeds": "prompt_embeds",
    "prompt_is_token_ids": "prompt_embeds",
    "resumable": "streamed input",
    "abort_immediately": "kv_transfer_params",
    "kv_hints": "kv_hints",
}

# `StructuredOutputsParams`: the forms that become options, and those that do not.
GRAMMARS = frozenset(("json", "regex", "grammar", "choice", "json_object", "structural_tag"))
GRAMMAR_OF_THE_SERVER = frozenset(("_backend", "_backend_was_auto"))
GRAMMAR_REFUSED = {
    "disable_any_whitespace": "disable_any_whitespace",
    "disable_additional_properties": "disable_additional_properties",
    "whitespace_pattern": "whitespace_pattern",
}


class Unsupported(Exception):
    """A field asks for something that no rank behind the bus can do: `name` for programs, the message for people."""

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(why or f"{name} is not supported by the cluster behind this server")
        self.name = name


def options_of(request: Any, *, reasoning_parser: str = "") -> Options:
    """Return the client library's options for an `EngineCoreRequest`. Raises Unsupported with the name of the first
    field that cannot be carried. `reasoning_parser` is this server's (empty: none): where a grammar or a budget depends
    on reasoning, ranks need the same."""
    check_request(request)
    options = sampling_options(request.sampling_params)
    if reasoning_parser and _reasons(request.sampling_params):
        options["reasoning_parser"] = reasoning_parser
        options["reasoning_ended"] = request.reasoning_ended
        if request.reasoning_parser_kwargs:
            options["reasoning_parser_kwargs"] = json.dumps(request.reasoning_parser_kwargs)
    if request.data_parallel_rank is not None:
        options["routed_dp_rank"] = request.data_parallel_rank
    if request.priority:
        options["priority"] = priority_of(request.priority)
    if request.cache_salt:
        options["cache_salt"] = request.cache_salt
    if len(request.request_id) <= RID_MAX:
        options["rid"] = request.request_id
    return options


def check_request(request: Any) -> None:
    """Raise Unsupported for a field of an `EngineCoreRequest` that asks for something no rank can do."""
    _refuse(request, REQUEST_TAKEN, REQUEST_REFUSED)
    if request.sampling_params is None or not request.prompt_token_ids:
        raise Unsupported("prompt", "a request without a prompt of token ids is not supported")


def check_sampling(params: Any) -> None:
    """Raise Unsupported for a field of `SamplingParams` that asks for something no rank can do."""
    extra, taken = params.extra_args or {}, TAKEN
    if extra.get("kv_transfer_params") is not None:
        raise Unsupported("kv_transfer_params", "kv_transfer_params are chosen by the cluster, not by a client")
    if params.prompt_logprobs is not None:
        taken |= {"skip_reading_prefix_cache"}
    if extra and extra.keys() <= {"session_id"}:
        taken |= {"extra_args"}
    _refuse(params, taken, REFUSED)
    if params.structured_outputs is not None:
        _refuse(params.structured_outputs, GRAMMARS | GRAMMAR_OF_THE_SERVER, GRAMMAR_REFUSED)


def sampling_options(params: Any) -> Options:
    """Return the client library's options for `SamplingParams`. Raises Unsupported as `options_of` does."""
    check_sampling(params)
    options = Options(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        ignore_eos=params.ignore_eos,
        stop_token_ids=tuple(params.stop_token_ids or ()),
    )
    if params.max_tokens is not None:
        options["max_tokens"] = params.max_tokens
    if params.seed is not None:
        options["seed"] = params.seed % 2**63
    if params.min_p:
        options["min_p"] = params.min_p
    if params.min_tokens:
        options["min_tokens"] = params.min_tokens
    if params.presence_penalty:
        options["presence_penalty"] = params.presence_penalty
    if params.frequency_penalty:
        options["frequency_penalty"] = params.frequency_penalty
    if params.repetition_penalty != 1.0:
        options["repetition_penalty"] = params.repetition_penalty
    if params.logprobs is not None:
        options["logprobs"] = _few("logprobs", params.logprobs)
    if params.prompt_logprobs is not None:
        options["prompt_logprobs"] = _few("prompt_logprobs", params.prompt_logprobs)
    if params.bad_words:
        options["bad_words"] = params.bad_words_token_ids or ()
    if params.allowed_token_ids:
        options["allowed_token_ids"] = params.allowed_token_ids
    if params.thinking_token_budget is not None:
        options["thinking_token_budget"] = params.thinking_token_budget
    if params.logit_bias:
        options["logit_bias"] = dict(params.logit_bias)
    if params.structured_outputs is not None:
        options |= grammar_options(params.structured_outputs)
    return options


def grammar_options(grammar: Any) -> Options:
    """Return the client library's option for `StructuredOutputsParams`, which `check_sampling` has passed."""
    if grammar.json is not None:
        given = grammar.json
        return {"json_schema": given if isinstance(given, str) else json.dumps(given)}
    if grammar.json_object:
        return {"json_schema": '{"type": "object"}'}
    if grammar.regex is not None:
        return {"regex": grammar.regex}
    if grammar.choice is not None:
        return {"choice": grammar.choice}
    if grammar.structural_tag is not None:
        return {"structural_tag": grammar.structural_tag}
    return {"ebnf": grammar.grammar}


def priority_of(priority: int) -> int:
    """Return the bus' priority, where higher goes first, for vLLM's, where lower does. Raises Unsupported beyond the
    bus' bounds."""
    if abs(priority) > PRIORITY_MAX:
        raise Unsupported("priority", f"priority: {-PRIORITY_MAX} to {PRIORITY_MAX}, not {priority}")
    return -priority


def _reasons(params: Any) -> bool:
    return params.structured_outputs is not None or params.thinking_token_budget is not None


def _few(name: str, count: int) -> int:
    if not 0 <= count <= LOGPROBS_MAX:
        raise Unsupported(name, f"{name}: 0 to {LOGPROBS_MAX}, not {count}")
    return count


def fields_of(record: Any) -> tuple[str, ...]:
    """Return the fields of a record of vLLM's: a msgspec struct or a dataclass, or the class of one."""
    return tuple(
        getattr(record, "__struct_fields__", ()) or getattr(record, "__dataclass_fields__", ()) or vars(record)
    )


def _refuse(record: Any, taken: frozenset[str], refused: Mapping[str, str]) -> None:
    for name in _others(fields_of(record), taken):
        value = getattr(record, name)
        if value is None or value is False:  # nearly all of them, for each request
            continue
        if _asks(value) and not (name in ZERO_IS_NOTHING and value == 0):
            raise Unsupported(refused.get(name, name))


@lru_cache
def _others(names: tuple[str, ...], taken: frozenset[str]) -> tuple[str, ...]:
    """Return those of `names` that are not `taken`: the same few for every request, so they are kept."""
    return tuple(name for name in names if name not in taken)


def _asks(value: object) -> bool:
    """Return true unless a value that is neither none nor false asks for nothing, because it is empty. A number asks
    for something, zero too."""
    if isinstance(value, (str, list, tuple, dict, set, frozenset)):
        return bool(value)
    return True
