"""A node over vLLM: the engine's choices, its processes, and the runners of its ranks. The rest is as in any other
node."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bus.endpoints import runtime_dir, split_port
from bus.errors import ConfigError, StartError
from bus.runtime.epochs import new_epoch
from bus.runtime.logs import get_logger
from bus.runtime.loop import Loop
from bus.runtime.ports import free_ports, hold, socket_host
from bus.runtime.sockets import Socket, Sockets
from bus.wire.messages import MAX_WORD, Role, parser_word
from nodes.config import NodeConfig
from nodes.link.runner import OVER_THE_BUS, RankFacts
from nodes.own.engines import smollm2
from nodes.vllm import versions
from nodes.vllm.cpus import claim_cores, keep_to
from nodes.vllm.devices import alone_on
from nodes.vllm.engine import EngineThread
from nodes.vllm.events import EventRelay
from nodes.vllm.reaper import Reaper
from nodes.vllm.runner import VllmRunner
from nodes.vllm.sampling import GRAMMARS, KNOWN, NOT_SPECULATING, REASONING, THINKING, UNIFIED
from nodes.vllm.smollm2 import hugging_face

LOOPBACK = "127.0.0.1"
FRONT = "PDBUS_VLLM_CONTROLLER"  # it makes vLLM's server a front of the bus (`pdbus.vllm_front`)
HEARTBEATS = 6  # decode renews what it waits for so many times a lease

log = get_logger("node")


@contextmanager
def opened(
    config: NodeConfig, model: str, arguments: Sequence[str], loop: Loop
) -> Iterator[tuple[list[VllmRunner], versions.Facts]]:
    """Load an engine and give the runners of its ranks; at the end everything it started is gone. ConfigError or
    StartError when that cannot begin."""
    versions.check_installed(split=config.role != "unified")
    os.environ.pop(FRONT, None)  # with it vLLM would submit what it shall compute to the bus
    keep_stdout()
    before = dict(os.environ)
    try:
        with _opened(config, model, arguments, loop) as found:
            yield found
    finally:
        for name in os.environ.keys() - before.keys():  # ports and cores of this engine are no other's
            del os.environ[name]


@contextmanager
def _opened(
    config: NodeConfig, model: str, arguments: Sequence[str], loop: Loop
) -> Iterator[tuple[list[VllmRunner], versions.Facts]]:
    with Sockets() as sockets:
        wanted = len(config.dp_ranks) if config.role != "decode" or config.decode_cache else 0
        events_port, streams = event_sockets(sockets, wanted)
        with _engine(config, model, arguments, loop, _choices(config, events_port), streams) as found:
            yield found


def event_sockets(sockets: Sockets, count: int) -> tuple[int, list[Socket]]:
    """Return the first of `count` ports in a row, and the sockets bound there; 0 and none for a count of 0. vLLM's
    publishers of KV events connect to them, one for each rank; they bind only where the endpoint is a wildcard. The
    ports are bound before the engine loads, so that no other engine gets them."""
    while count:
        first = free_ports(LOOPBACK, count)
        found: list[Socket] = []
        try:
            for port in range(first, first + count):
                found.append(sockets.bus_in((b"",), f"tcp://{LOOPBACK}:{port}"))
            return first, found
        except StartError:  # another node was faster
            for socket in found:
                sockets.close_socket(socket)
    return 0, []


@contextmanager
def _engine(
    config: NodeConfig, model: str, arguments: Sequence[str], loop: Loop, choices: versions.Choices,
    streams: Sequence[Socket],
) -> Iterator[tuple[list[VllmRunner], versions.Facts]]:  # fmt: skip
    _set_missing(versions.environment(choices))
    path = str(hugging_face()) if model == smollm2.NAME else model
    versions.check_requests()
    args = versions.engine_args(path, model, arguments, choices)
    cores: list[int] = []
    if versions.on_cpu():
        cores = claim_cores(Path(runtime_dir())) if versions.CPU_BIND not in os.environ else []
        _set_missing(versions.cpu_environment(cores, choices.ranks))
    runners: list[VllmRunner] = []

    def stepped(index: int, kv_usage: float) -> None:
        if index < len(runners):
            runners[index].stepped(kv_usage)

    def build() -> Any:
        return versions.start(args, stepped)

    thread = EngineThread(build, lambda client: client.shutdown(), lambda: keep_to(cores, reaper.processes()))
    with Reaper() as reaper, ExitStack() as stack:
        with alone_on(Path(runtime_dir()), versions.devices(args), config.wait_s, _log_wait):
            engine = stack.enter_context(thread)
        keep_to(cores, reaper.processes())
        facts, lease_s = versions.facts_of(engine.client), versions.lease_s(engine.client)
        if facts.decode_cache:
            versions.report_local_hits(engine.client)
        log_loaded(facts)
        for index, dp_rank in enumerate(config.dp_ranks):
            runner = VllmRunner(
                rank_facts(facts, lease_s, config.role),
                engine.client,
                name=f"{choices.engine_id}-{dp_rank}",
                sampling=versions.sampling,
                prompt=versions.prompt,
                check=versions.check_of(engine.client),
                lease_s=lease_s,
                on_engine=engine.call,
                on_link=loop.call_threadsafe,
                options={"data_parallel_rank": index} if choices.ranks > 1 else {},
                prioritised=facts.prioritised,
            )
            runners.append(runner)
            if streams:
                runner.relay = EventRelay(config.instance, dp_rank, runner.cache_changed)
                loop.add(streams[index], runner.relay.received)
        yield runners, facts


def rank_facts(facts: versions.Facts, lease_s: float, role: Role = "unified") -> RankFacts:
    """Return the description of a rank of this role that runs this engine. A KV cache handed over needs a heartbeat of
    its lease, and 2 s, left."""
    known = [name for name in KNOWN if not (facts.speculates and name in NOT_SPECULATING)]
    if role == "unified":
        known += UNIFIED
    if facts.tokenizes:
        known += GRAMMARS
    if facts.limits_thinking:
        known += THINKING
    if facts.reasoning_parser and len(word := parser_word(facts.reasoning_parser)) <= MAX_WORD:
        known += (*REASONING, word)
    return RankFacts(
        model=facts.model,
        max_context=facts.max_context,
        kv_capacity=facts.kv_capacity,
        max_running=facts.max_running,
        block_tokens=facts.block_tokens,
        vocab_size=facts.vocab_size,
        eos_ids=facts.eos_ids,
        kv_layout=facts.kv_layout,
        kv_transfer=facts.connector or OVER_THE_BUS,
        wants_prompt=True,
        params=tuple(known),
        prefills=facts.decode_cache,
        reads_back=facts.reads_back,
        handle_margin_s=lease_s / HEARTBEATS + 2.0,
    )


def _choices(config: NodeConfig, events_port: int) -> versions.Choices:
    ranks = len(config.dp_ranks)
    scheme, _, rest = config.data.partition("://")
    host = socket_host(split_port(rest)[0]) if scheme == "tcp" else LOOPBACK
    return versions.Choices(
        role=config.role,
        ranks=ranks,
        engine_id=f"{config.instance}-{config.dp_ranks[0]}-{new_epoch():x}",
        host=host,
        side_port=side_ports(host, ranks) if config.role in versions.ROLES else 0,
        events_port=events_port,
        lease_s=max(1, int(config.limits.hold_s)),
        decode_cache=config.decode_cache,
    )


def side_ports(host: str, count: int) -> int:
    """Return the first of `count` ports for the engine's KV transfers that no other engine uses; they are reserved from
    now on. If a port is taken when vLLM binds it, a minute later, its core waits without end. ConfigError for a port
    that the environment names and that is taken now."""
    given = os.environ.get(versions.SIDE_PORT)
    if given is None:
        while True:
            first = free_ports(host, count)
            if all(hold(host, first + rank) for rank in range(count)):
                return first
    if not given.isdecimal() or not 0 < int(given) < 65536 - count:
        raise ConfigError(f"{versions.SIDE_PORT} {given!r}: name a port, or leave it to the node")
    for port in range(int(given), int(given) + count):
        if not hold(host, port):
            why = f"port {port} is taken, each engine needs one of its own; leave it to the node"
            raise ConfigError(f"{versions.SIDE_PORT} {given}: {why}")
    return int(given)


def _set_missing(variables: Mapping[str, str]) -> None:
    """Set the variables that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _log_wait(device: str) -> None:
    log.info("engine.waits", gpu=device, until="another engine on it has loaded")


def log_loaded(facts: versions.Facts) -> None:
    """Log, in one line, what an operator compares with `vllm serve`."""
    log.info(
        "engine.loaded", model=facts.model, max_context=facts.max_context, kv_capacity=facts.kv_capacity,
        max_running=facts.max_running, step_tokens=facts.step_tokens, block_tokens=facts.block_tokens,
        model_runner=facts.model_runner, async_scheduling=facts.async_scheduling, decode_cache=facts.decode_cache,
        reads_back=facts.reads_back,
    )  # fmt: skip


def keep_stdout() -> None:
    """Keep stdout for the READY line, which a launcher reads and nothing else: what vLLM's processes print goes to
    stderr from now on, where logs go."""
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
