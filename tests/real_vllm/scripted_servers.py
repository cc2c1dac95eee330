"""vLLM's API server without a model, in this process: over an engine core that says what a script does (`direct`), or
in front of the bus (`bus`); and what its application answers, without a port.

Both say a token only once the server waits for the next one, so that each token is an event of its own wherever vLLM
makes one of it. `direct` servers have to be made and asked before the first `bus` one: a front replaces parts of vLLM.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from scripted import Gate, Script
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.stats import PrefillStats

TASKS = ("generate",)
WAIT_S = 60.0


def gated(gate: Gate) -> Callable[[], None]:
    """Let each reader of an output, where none is there, permit a token. Returns what undoes it."""
    get = RequestOutputCollector.get

    @wraps(get)
    async def get_next(self: Any) -> Any:
        if self.output is None:
            gate.release()
        return await get(self)

    RequestOutputCollector.get = get_next
    return lambda: setattr(RequestOutputCollector, "get", get)


class Resources:
    engine_dead = False


class ScriptedCore:
    """A replacement for vLLM's client of an engine core, for one event loop."""

    def __init__(self, script: Script, gate: Gate) -> None:
        self.resources = Resources()
        self.engine_ranks_managed = [0]
        self._script = script
        self._gate = gate
        self._live: dict[str, tuple[Any, tuple[int, ...], int]] = {}
        self._made: asyncio.Queue[Any] = asyncio.Queue()
        gate.on_change.append(self._make_tokens)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return TASKS

    async def add_request_async(self, request: Any) -> None:
        answer = self._script.answer(request.prompt_token_ids)
        assert answer is not None
        self._live[request.request_id] = request, answer, 0
        self._make_tokens()

    async def get_output_async(self) -> Any:
        outputs = [await self._made.get()]
        while not self._made.empty():
            outputs.append(self._made.get_nowait())
        finished = {each.request_id for each in outputs if each.finish_reason is not None}
        return EngineCoreOutputs(outputs=outputs, finished_requests=finished or None)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._live.pop(request_id, None)

    async def reset_mm_cache_async(self) -> None: ...
    async def reset_encoder_cache_async(self) -> None: ...

    def dp_engines_running(self) -> bool:
        return bool(self._live)

    def get_kv_event_sources(self) -> dict[int, Any]:
        return {}

    def shutdown(self, timeout: float | None = None) -> None: ...

    def _make_tokens(self) -> None:
        while self._live:
            for request_id, (request, answer, made) in list(self._live.items()):
                if not self._gate.take():
                    return
                params, token = request.sampling_params, answer[made]
                output = EngineCoreOutput(request_id, [token])
                if not made:
                    output.prefill_stats = PrefillStats()
                    output.prefill_stats.set(len(request.prompt_token_ids), 0, 0)
                self._live[request_id] = request, answer, made + 1
                if token == params.eos_token_id and not params.ignore_eos:
                    output.finish_reason = FinishReason.STOP
                elif token in (params.stop_token_ids or ()):
                    output.finish_reason, output.stop_reason = FinishReason.STOP, token
                elif made + 1 in (params.max_tokens, len(answer)):
                    output.finish_reason = FinishReason.LENGTH
                if output.finish_reason is not None:
                    del self._live[request_id]
                self._made.put_nowait(output)


class Engine:
    """An engine's front end, for the running event loop, and the applications of servers with it; `core` makes its
    client of an engine core (None: as vLLM does)."""

    def __init__(self, model: Path, arguments: Sequence[str], core: Callable[[Any], Any] | None) -> None:
        self._line = ["--model", str(model), "--served-model-name", "scripted", *arguments]
        self._core = core

    async def __aenter__(self) -> Engine:
        config = AsyncEngineArgs.from_cli_args(_parsed(self._line)).create_engine_config()
        self._structured_outputs = config.structured_outputs_config
        make, core = EngineCoreClient.make_async_mp_client, self._core
        if core is not None:
            EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: core(config))
        try:
            self._engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        finally:
            EngineCoreClient.make_async_mp_client = staticmethod(make)
        async with asyncio.timeout(WAIT_S):
            while not await self._healthy():  # a front looks for its controller
                await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.shutdown()

    async def _healthy(self) -> bool:
        try:
            await self._engine.check_health()
        except EngineDeadError:
            return False
        return True

    async def server(self, arguments: Sequence[str]) -> Server:
        """Return a server with these arguments besides."""
        args = _parsed([*self._line, *arguments])
        args.structured_outputs_config = self._structured_outputs
        app = build_app(args, TASKS, self._engine.model_config)
        await init_app_state(self._engine, app.state, args, TASKS)
        return Server(app)


def _parsed(line: Sequence[str]) -> Any:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    validate_parsed_serve_args(args)
    return args


class Server:
    """The application of one server."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[int, list[bytes]]:
        """The status, and the parts of the answer as they came: the events of a stream."""
        parts: list[bytes] = []
        status: list[int] = []
        sent = json.dumps(body).encode()
        requests = [{"type": "http.request", "body": sent, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if requests:
                return requests.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
            elif message.get("body"):
                parts.append(message["body"])

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(sent)).encode())]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
        }  # fmt: skip
        await asyncio.wait_for(self._app(scope, receive, send), WAIT_S)
        return status[0], parts
