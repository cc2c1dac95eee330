"""vLLM's functions that are replaced or called, the check that they are as expected, and the replacing itself.

Nothing is replaced unless every line of the tables fits: vLLM has changed otherwise, and its server refuses to start.
Modules are looked up in the process as they are, because vLLM loads plugins after its own server code.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from typing import Any, NamedTuple

from bus.errors import ConfigError
from nodes.vllm.versions import installed
from pdbus.edge.client import EdgeClient
from pdbus.vllm_front.fields import Unsupported, check_sampling, fields_of
from pdbus.vllm_front.launch import refused_arguments
from pdbus.vllm_front.settings import Settings, read

TESTED = ("0.32.0",)  # with a real server
CLAUDE_CODE = "x-claude-code-session-id"  # the header by which Claude Code names its session
_ENTRY = "vllm.entrypoints.launchers.api_server.entry"
_APP = "vllm.entrypoints.launchers.app"
_CLI = "vllm.entrypoints.cli.serve"
_CORE, _LLM = "vllm.v1.engine.core_client", "vllm.v1.engine.async_llm"


class Seam(NamedTuple):
    """A function `name` of `module`, with the names of its parameters as written there."""

    module: str
    name: str
    parameters: str


class Record(NamedTuple):
    """A class, with the fields and attributes that are read or set."""

    module: str
    name: str
    fields: tuple[str, ...]


REPLACED = (
    Seam(
        _CORE, "EngineCoreClient.make_async_mp_client",
        "vllm_config, executor_class, log_stats, client_addresses, client_count, client_index, renderer",
    ),
    Seam(_LLM, "AsyncLLM.check_admission", "self, n, request_id"),
    Seam(_LLM, "AsyncLLM.check_health", "self"),
    Seam(
        _LLM, "AsyncLLM.generate",
        "self, prompt, sampling_params, request_id, *, prompt_text, lora_request, tokenization_kwargs, trace_headers, "
        "priority, data_parallel_rank, session_id, kv_hints, reasoning_ended, reasoning_parser_kwargs",
    ),
    Seam(
        "vllm.v1.engine.input_processor", "InputProcessor.process_inputs",
        "self, request_id, prompt, params, supported_tasks, arrival_time, lora_request, tokenization_kwargs, "
        "trace_headers, priority, data_parallel_rank, resumable, session_id, kv_hints",
    ),
    Seam(
        "vllm.entrypoints.openai.responses.protocol", "ResponsesRequest.to_sampling_params",
        "self, default_max_tokens, default_sampling_params",
    ),
    Seam("vllm.entrypoints.openai.responses.serving", "OpenAIServingResponses.create_responses",
         "self, request, raw_request"),
    Seam("vllm.entrypoints.generate.base.serving", "GenerateBaseServing._get_session_id", "request, raw_request"),
    Seam(_APP, "init_entrypoints_middleware", "args, app, supported_tasks"),
    Seam(_ENTRY, "build_async_engine_client", "args, *, usage_context, client_config"),
    Seam(_CLI, "ServeSubcommand.cmd", "args"),
    Seam(_CLI, "launch_core_engines", "vllm_config, executor_class, log_stats, addresses"),
    Seam(
        _CLI, "APIServerProcessManager.__init__",
        "self, listen_address, sock, args, num_servers, input_listeners, output_listeners, target_server_fn, "
        "stats_update_address, tensor_queue",
    ),
)  # fmt: skip

CALLED = (
    Seam("vllm.v1.utils", "run_api_server_worker_proc", "listen_address, sock, args, client_config, **uvicorn_kwargs"),
    Seam("vllm.v1.engine.output_processor", "OutputProcessor.abort_requests", "self, request_ids, internal"),
    Seam("vllm.v1.engine.output_processor", "RequestOutputCollector.put", "self, output"),
    Seam("vllm.v1.metrics.stats", "PrefillStats.set",
         "self, num_prompt_tokens, num_local_cached_tokens, num_external_cached_tokens"),
    Seam("vllm.v1.metrics.stats", "PrefillStats.finalize", "self, num_cached_tokens"),
    Seam("vllm.v1.engine", "EngineCoreEvent.new_event", "cls, event_type, timestamp"),
)  # fmt: skip

RECORDS = (
    Record(
        "vllm.v1.engine", "EngineCoreRequest",
        ("request_id", "prompt_token_ids", "sampling_params", "data_parallel_rank", "priority", "trace_headers",
         "external_req_id", "reasoning_ended", "reasoning_parser_kwargs", "cache_salt", "session_id"),
    ),
    Record(
        "vllm.v1.engine", "EngineCoreOutput",
        ("request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "finish_reason",
         "stop_reason", "events", "prefill_stats"),
    ),
    Record("vllm.v1.engine", "EngineCoreOutputs", ("outputs", "finished_requests", "scheduler_stats")),
    Record("vllm.v1.engine.utils", "CoreEngineLaunch", ("engine_manager", "coordinator", "addresses", "tensor_queue")),
    Record("vllm.v1.metrics.stats", "SchedulerStats", ("num_running_reqs", "num_waiting_reqs")),
    Record(
        "vllm.sampling_params", "SamplingParams",
        ("temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens",
         "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "logit_bias", "structured_outputs",
         "extra_args", "prompt_logprobs", "bad_words", "allowed_token_ids", "thinking_token_budget"),
    ),
    Record(
        "vllm.sampling_params", "StructuredOutputsParams",
        ("json", "regex", "choice", "grammar", "json_object", "structural_tag"),
    ),
)  # fmt: skip


def serves_http() -> bool:
    """Return true in a process that has loaded vLLM's API server or its asynchronous engine: others, such as the one
    that looks at a model's class, have nothing to replace."""
    return any(name in sys.modules for name in (_ENTRY, _CLI, _LLM))


def mismatches() -> Iterator[str]:
    """Yield a line for each difference between this vLLM and the tables; none: it is as expected. It imports modules of
    vLLM's."""
    for seam in (*REPLACED, *CALLED):
        try:
            found = parameters_of(_find(seam.module, seam.name))
        except (ImportError, AttributeError):
            yield f"{seam.module}.{seam.name} is not there"
            continue
        if found != seam.parameters:
            yield f"{seam.module}.{seam.name} takes ({found}), not ({seam.parameters})"
    for record in RECORDS:
        try:
            kind = _find(record.module, record.name)
        except (ImportError, AttributeError):
            yield f"{record.module}.{record.name} is not there"
            continue
        if missing := sorted(set(record.fields) - set(fields_of(kind))):
            yield f"{record.module}.{record.name} has no {', '.join(missing)}"


def parameters_of(function: Any) -> str:
    """Return the names of a function's parameters."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(name.startswith("*") for name in names):
            names.append("*")
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        names.append(stars + parameter.name)
    return ", ".join(names)


def _find(module: str, name: str) -> Any:
    found: Any = import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        found = getattr(found, "__func__", found)
    return inspect.unwrap(found)


_installed = False
_servers = 1  # API servers of one parent, of which this process is one


def install(settings: Settings) -> None:
    """Replace the seams in this process; a second call does nothing. Raises ConfigError where a key is missing or vLLM
    differs from the tables; then nothing is replaced."""
    global _installed
    if _installed:
        return
    EdgeClient(settings.controller, settings.keys, settings.key_name)  # a key that is missing is one line now
    try:
        wrong = next(mismatches(), "")
    except Exception as error:  # a module of vLLM's fails as it is imported
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        version = installed() or "(unknown)"
        raise ConfigError(f"vLLM {version} is not as its front knows it (tested: {', '.join(TESTED)}): {wrong}")
    _installed = True
    _replace_engine(settings)
    _replace_requests()
    _replace_server()


def _replace_engine(settings: Settings) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.engine.exceptions import EngineDeadError

    from pdbus.vllm_front.core import BusCore

    kind = type("BusEngineCoreClient", (BusCore, EngineCoreClient), {})

    def make(vllm_config: Any, *_: Any, client_count: int = 1, **__: Any) -> Any:
        global _servers
        _servers = client_count
        return kind(vllm_config, settings)

    EngineCoreClient.make_async_mp_client = staticmethod(make)
    admission, begin, health = AsyncLLM.check_admission, AsyncLLM.__init__, AsyncLLM.check_health

    @wraps(begin)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.engine_core.processor = self.output_processor

    @wraps(admission)
    def check_admission(self: Any, n: int = 1, request_id: str | None = None) -> None:
        admission(self, n, request_id)
        self.engine_core.admit()

    @wraps(health)
    async def check_health(self: Any) -> None:
        await health(self)
        if self.engine_core.unready():
            raise EngineDeadError

    AsyncLLM.__init__ = __init__
    AsyncLLM.check_admission = check_admission
    AsyncLLM.check_health = check_health


def _replace_requests() -> None:
    """Refuse fields by name while a request still has no answer, and let a data-parallel rank be any of the cluster."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    from pdbus.vllm_front.asked import Failure
    from pdbus.vllm_front.records import error_of

    generate, process, responses = (
        AsyncLLM.generate, InputProcessor.process_inputs, ResponsesRequest.to_sampling_params,
    )  # fmt: skip

    def checked(params: Any) -> Any:
        try:
            check_sampling(params)
        except Unsupported as error:
            raise error_of(Failure(400, str(error), error.name)) from None
        return params

    @wraps(generate)
    def generate_checked(self: Any, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
        return generate(self, prompt, checked(sampling_params), request_id, **kwargs)

    @wraps(process)
    def process_inputs(self: Any, *args: Any, data_parallel_rank: int | None = None, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        request.data_parallel_rank = data_parallel_rank
        return request

    @wraps(responses)
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        return checked(responses(self, *args, **kwargs))

    create, session = OpenAIServingResponses.create_responses, GenerateBaseServing._get_session_id

    @wraps(create)
    async def create_responses(self: Any, request: Any, raw_request: Any = None) -> Any:
        if request.previous_response_id and _servers > 1:
            why = "previous_response_id: a response is kept by one of several servers; send the whole conversation"
            raise error_of(Failure(400, why, "previous_response_id"))
        return await create(self, request, raw_request)

    @wraps(session)
    def session_of(request: Any, raw_request: Any) -> Any:
        if given := session(request, raw_request):
            return given
        headers = raw_request.headers if raw_request is not None else {}
        return headers.get(CLAUDE_CODE) or getattr(request, "prompt_cache_key", None)

    OpenAIServingResponses.create_responses = create_responses
    GenerateBaseServing._get_session_id = staticmethod(session_of)
    AsyncLLM.generate = generate_checked
    InputProcessor.process_inputs = process_inputs
    ResponsesRequest.to_sampling_params = to_sampling_params


def _replace_server() -> None:
    from vllm.entrypoints.cli import serve
    from vllm.entrypoints.launchers import app
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine.utils import CoreEngineLaunch

    from pdbus.vllm_front.middleware import StatusOfFirstEvent, is_news

    middleware, build_client = app.init_entrypoints_middleware, entry.build_async_engine_client
    command = serve.ServeSubcommand.cmd

    @wraps(middleware)
    def init_middleware(args: Any, made: Any, supported_tasks: Any) -> None:
        middleware(args, made, supported_tasks)
        made.add_middleware(StatusOfFirstEvent, state=made.state)  # the last one is around all others

    @wraps(build_client)
    def build_client_checked(args: Any, **kwargs: Any) -> Any:
        _check(args)
        return build_client(args, **kwargs)

    @wraps(command)
    def command_checked(args: Any) -> None:
        _check(args)
        command(args)

    @contextmanager
    def launch_nothing(vllm_config: Any, executor_class: Any, log_stats: Any, addresses: Any) -> Iterator[Any]:
        yield CoreEngineLaunch(engine_manager=None, coordinator=None, addresses=addresses, tensor_queue=None)

    logging.getLogger("vllm.entrypoints.anthropic.serving").addFilter(is_news)
    app.init_entrypoints_middleware = init_middleware
    entry.build_async_engine_client = build_client_checked
    serve.ServeSubcommand.cmd = staticmethod(command_checked)
    serve.launch_core_engines = launch_nothing
    serve.APIServerProcessManager = _with_target(serve.APIServerProcessManager)


def _with_target(manager: Callable[..., Any]) -> Callable[..., Any]:
    """Return the manager of several servers, whose processes find this package without its entry point too."""
    return partial(manager, target_server_fn=run_worker)


def run_worker(*args: Any, **kwargs: Any) -> None:
    """Run one of several API servers until it ends: the main function of its process."""
    from vllm.v1.utils import run_api_server_worker_proc

    install(read(os.environ))
    run_api_server_worker_proc(*args, **kwargs)


def _check(args: Any) -> None:
    if why := refused_arguments(args):
        raise SystemExit(f"pdbus: {why}")
