"""What a node over vLLM takes and refuses before there is any vLLM; what it takes of its machine; which model it is."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bus.errors import ConfigError, StartError
from bus.runtime.ports import free_ports
from controller.load.groups import exchange
from nodes.config import NodeConfig
from nodes.vllm import main, seams, versions
from nodes.vllm.cpus import claim_cores, keep_to
from nodes.vllm.devices import alone_on
from nodes.vllm.fingerprint import fingerprint

HERE = [sys.executable, "-P", "-m", "nodes.decode", "--bus", "ipc:///tmp/pdx/b", "--controller", "ipc:///tmp/pdx/c"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--engine", "vllm"], "--engine vllm needs a model: --model PATH"),
        (["--engine", "vllm", "--model", "m", "--kv-tokens", "9"], "--kv-tokens is for our own engines"),
        (["--engine", "vllm", "--model", "m", "--sim-base-s", "1"], "--sim-base-s is for our own engines"),
        (["--engine", "vllm", "--model", "m", "--decode-cache"], "needs the Python package 'vllm'; run: pip"),
        (["--engine", "sim", "--", "--dtype", "float32"], "'--dtype': only --engine vllm takes arguments"),
        (["--engine", "vllm", "--model", "m", "--", "--dtype", "float32"], "needs the Python package 'vllm'; run: pip"),
    ],
)
def test_mistakes_are_one_line(args: list[str], words: str) -> None:
    if "Python package" in words and versions.find_spec("vllm"):
        pytest.skip("it is installed here")
    done = subprocess.run([*HERE, *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_node_never_submits_to_its_own_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that makes vLLM's server a front would make a rank's engine one too, so it is gone before vLLM is
    imported."""
    seen: list[bool] = []

    @contextmanager
    def opened(*_: object) -> Iterator[object]:
        seen.append("PDBUS_VLLM_CONTROLLER" in os.environ)
        yield object()

    monkeypatch.setenv("PDBUS_VLLM_CONTROLLER", "tcp://127.0.0.1:5560")
    monkeypatch.setattr(versions, "check_installed", lambda split: None)
    monkeypatch.setattr(main, "keep_stdout", lambda: None)
    monkeypatch.setattr(main, "_opened", opened)
    with main.opened(SimpleNamespace(role="decode"), "m", (), None):  # type: ignore[arg-type]
        pass
    assert seen == [False]
    from pdbus.vllm_front.settings import CONTROLLER

    assert main.FRONT == CONTROLLER


def test_a_vllm_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: object())
    found = {"vllm": "0.23.1"}

    def version(name: str) -> str:
        if name not in found:
            raise versions.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(versions.metadata, "version", version)
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.24 or newer, not 0\.23\.1"):
        versions.check_installed(split=True)
    found["vllm"] = "0.32.0+cpu"
    versions.check_installed(split=True)


def test_a_vllm_that_is_not_as_known_is_one_sentence_before_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.async_llm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(versions, "installed", lambda: "0.99.1")
    known = r"vLLM 0\.99\.1 is not as pdbus knows it from 0\.24 to 0\.32; install one of these "
    with pytest.raises(StartError, match=known + r"\(ImportError: cannot import name 'AsyncLLM'"):
        versions.check_requests()

    class AsyncLLM:
        def generate(self, prompt: object, sampling_params: object, request_id: str, *, priority: int = 0) -> None: ...

    monkeypatch.setattr(sys.modules["vllm.v1.engine.async_llm"], "AsyncLLM", AsyncLLM, raising=False)
    monkeypatch.setattr(versions, "prompt", lambda ids, salt: ids)
    monkeypatch.setattr(versions, "sampling", lambda **arguments: None)
    with pytest.raises(
        StartError, match=known + r"\(TypeError: got an unexpected keyword argument 'data_parallel_rank'"
    ):
        versions.check_requests()
    monkeypatch.setattr(AsyncLLM, "generate", lambda self, prompt, params, id, **options: None)
    versions.check_requests()


def test_two_engines_of_a_machine_share_no_core_and_further_ones_are_dealt_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 6, 9})
    claimed = [claim_cores(tmp_path) for _ in range(5)]
    assert claimed == [[0, 1, 2], [3, 6, 9], [0, 1, 2], [3, 6, 9], [0, 1, 2]]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4})
    assert [claim_cores(tmp_path) for _ in range(2)] == [[4], [4]]
    for path in tmp_path.iterdir():
        with path.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_no_two_engines_get_the_same_side_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's core waits for ever where it can't bind it."""
    monkeypatch.delenv(versions.SIDE_PORT, raising=False)
    first = free_ports("127.0.0.1", 4)
    picks = iter([first, first + 1, first + 3])
    monkeypatch.setattr(main, "free_ports", lambda host, count: next(picks))
    assert main.side_ports("127.0.0.1", 2) == first
    assert main.side_ports("127.0.0.1", 1) == first + 3, "the second is claimed, if not bound yet"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv(versions.SIDE_PORT, str(port))
        with pytest.raises(ConfigError, match=f"port {port} is taken, each engine needs one of its own"):
            main.side_ports("127.0.0.1", 1)
    assert main.side_ports("127.0.0.1", 1) == port
    with pytest.raises(ConfigError, match="is taken"):  # as for the second node of `pdbus up`
        main.side_ports("127.0.0.1", 1)
    monkeypatch.setenv(versions.SIDE_PORT, "http")
    with pytest.raises(ConfigError, match="'http': name a port, or leave it to the node"):
        main.side_ports("127.0.0.1", 1)


@pytest.mark.parametrize(
    ("cores", "ranks", "bound"),
    [([0, 1, 2], 1, "0,1,2"), ([0, 1, 2], 2, "0,2|1"), ([4], 2, "nobind"), ([], 1, "nobind")],
)
def test_the_ranks_of_one_engine_share_its_cores(cores: list[int], ranks: int, bound: str) -> None:
    assert versions.cpu_environment(cores, ranks)[versions.CPU_BIND] == bound


THREADS = """
import os, threading
def pinned(core):
    if core: os.sched_setaffinity(0, [int(core)])
    os.write(1, b"%d\\n" % threading.get_native_id())
    threading.Event().wait()
for core in input().split(","): threading.Thread(target=pinned, args=[core], daemon=True).start()
pinned("{last}")
"""


def test_what_vllm_pins_to_the_last_core_is_put_back() -> None:
    """Of other threads than the main one, what another engine's cores are among; a part of the own ones stays."""
    cores = sorted(os.sched_getaffinity(0))
    ours, last = cores[: max(1, len(cores) // 2)], cores[-1]
    program = THREADS.format(last=last)
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{last},{ours[0]},\n".encode())
        child.stdin.flush()
        threads = {int(child.stdout.readline()) for _ in range(4)}
        keep_to([], [child.pid])
        assert os.sched_getaffinity(child.pid) == {last}
        keep_to(ours, [2**22 + 1, child.pid])
        assert os.sched_getaffinity(child.pid) == set(ours)
        assert all(os.sched_getaffinity(thread) <= set(ours) for thread in threads)
        keep_to(cores, [child.pid])
        assert os.sched_getaffinity(child.pid) == set(cores)
        assert {ours[0]} in [os.sched_getaffinity(thread) for thread in threads]
        child.kill()


def test_models_that_differ_in_weights_or_configuration_differ(tmp_path: Path) -> None:
    """So that their ranks are never paired: a KV cache of the one means nothing to the other."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"\1" * 300_000)
    first = fingerprint(str(folders[0]), {"layers": 2})
    assert fingerprint(str(folders[1]), {"layers": 2}) == first, "wherever it lies"
    assert fingerprint(str(folders[1]), {"layers": 3}) != first
    with (folders[1] / "model.safetensors").open("r+b") as file:
        file.seek(299_000)
        file.write(b"\2")
    assert fingerprint(str(folders[1]), {"layers": 2}) != first
    assert fingerprint("org/model", {"layers": 2}) != fingerprint("org/other", {"layers": 2})


@pytest.mark.parametrize(
    ("generation", "configured", "own", "found"),
    [
        ({"eos_token_id": 0}, 5, None, (0,)),
        ({"eos_token_id": [0, 2]}, 0, 2, (0, 2)),
        ({}, 0, None, (0,)),
        ({}, [3, 4], 7, (3, 4, 7)),
        ({"eos_token_id": 2}, 2, 9, (2, 9)),
        ({}, None, None, ()),
    ],
)
def test_end_tokens_are_the_models_and_the_tokenizers(
    generation: dict[str, Any], configured: Any, own: int | None, found: tuple[int, ...]
) -> None:
    """Some have the id 0; fine-tunes name theirs in the tokenizer alone."""
    client = client_of(configured=configured, generation=generation, own=own)
    assert versions.facts_of(client).eos_ids == found


def client_of(
    *, configured: Any = 2, generation: dict[str, Any] | None = None, own: int | None = None, commit: str | None = None,
    connector: str = "", ranks: int = 1, **cache: Any,
) -> Any:  # fmt: skip
    """An `AsyncLLM`, as far as facts are read off it."""
    said = {"eos_token_id": configured}
    model = SimpleNamespace(
        served_model_name="m", max_model_len=4096, dtype="bf16", model="/nowhere", skip_tokenizer_init=False,
        hf_config=SimpleNamespace(**said, to_dict=lambda: said, _commit_hash=commit),
        try_get_generation_config=lambda: generation or {}, get_vocab_size=lambda: 49152,
    )  # fmt: skip
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(**({"cache_dtype": "auto", "block_size": 16, "num_gpu_blocks": 100} | cache)),
        kv_transfer_config=SimpleNamespace(kv_connector=connector) if connector else None,
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512, policy="fcfs"),
    )
    return SimpleNamespace(vllm_config=config, tokenizer=SimpleNamespace(eos_token_id=own))


def test_capacity_and_block_size_are_vllms_own_where_it_says_them() -> None:
    """Blocks times their size is too much where layers with windows have groups of their own, too little where ranks
    share a context."""
    old = versions.facts_of(client_of(ranks=2))
    assert (old.kv_capacity, old.block_tokens) == (800, 16)
    unsaid = versions.facts_of(client_of(kv_cache_size_tokens=None, effective_attention_block_size=None))
    assert (unsaid.kv_capacity, unsaid.block_tokens) == (1600, 16)
    new = versions.facts_of(client_of(ranks=2, kv_cache_size_tokens=1234, effective_attention_block_size=128))
    assert (new.kv_capacity, new.block_tokens) == (1234, 128), "of one rank, each"


def test_a_decode_rank_that_keeps_its_kv_caches_says_that_it_computes_prompts() -> None:
    """Only with our connector, and where vLLM itself has not turned prefix caching off, as it does for some models."""

    def prefills(module: str, caching: bool, kv_role: str = "kv_consumer") -> bool:
        client = client_of(connector="NixlConnector", enable_prefix_caching=caching)
        transfer = client.vllm_config.kv_transfer_config
        transfer.kv_connector_module_path, transfer.kv_role = module, kv_role
        for back in (True, False):
            transfer.kv_connector_extra_config = {"bidirectional_kv_xfer": back}
            found = main.rank_facts(versions.facts_of(client), 60.0, "decode")
            assert found.reads_back == (back and caching and bool(module))
        return found.prefills

    assert prefills(versions.SAFE_PULLS, True)
    assert not prefills("", True)
    assert not prefills(versions.SAFE_PULLS, False)
    assert not prefills(versions.SAFE_PULLS, True, "kv_both"), "a prefill engine, which reads back"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"kv_transfer_config": ("NixlConnector", {})}, ""),
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"kv_transfer_config": ("OffloadingConnector", {})}, "the connector is OffloadingConnector, not vLLM's own"),
        ({"prefill_context_parallel_size": 2}, "vLLM's connector does not read with --prefill-context-parallel-size"),
        ({"nnodes": 2}, "workers on other machines"),
        ({"distributed_executor_backend": "ray"}, "workers on other machines"),
    ],
)
def test_what_keeps_an_engine_from_keeping_what_it_reads(
    given: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions.seams, "difference", lambda: "")
    if "kv_transfer_config" in given:
        name, extra = given["kv_transfer_config"]
        transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra, kv_connector_module_path=None)
        given = {"kv_transfer_config": transfer}
    asked = SimpleNamespace(**({"kv_transfer_config": None, "enable_prefix_caching": None} | given))
    found = versions._no_safe_reads(asked)
    assert found.startswith(why)
    assert bool(found) == bool(why)
    monkeypatch.setattr(versions, "installed", lambda: "0.33.0")
    monkeypatch.setattr(versions.seams, "difference", lambda: "ReqMeta is not there")
    assert versions._no_safe_reads(asked) == (found or "vLLM 0.33.0: ReqMeta is not there")


def test_a_vllm_whose_code_differs_from_what_was_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its text: a function of the same name and parameters may do something else."""
    module: Any = ModuleType("vllm_part")
    module.fingerprint, module.Reads = fingerprint, socket.SocketIO
    monkeypatch.setitem(sys.modules, "vllm_part", module)

    def table(*names: str) -> tuple[seams.Seam, ...]:
        found = (seams.Seam("vllm_part", name, "") for name in names)
        return tuple(each._replace(source=seams._hash(each)) for each in found)

    known = table("fingerprint", "Reads.readinto")
    monkeypatch.setattr(seams, "SEAMS", known)
    assert seams.difference() == ""
    module.fingerprint = claim_cores
    assert seams.difference() == "fingerprint is not as pdbus knows it"
    monkeypatch.setattr(seams, "SEAMS", known[1:])
    module.Reads = SimpleNamespace(readinto=len)
    assert seams.difference() == "Reads.readinto has no source text here"
    module.Reads = SimpleNamespace()
    assert seams.difference() == "Reads.readinto is not there"
    monkeypatch.delitem(sys.modules, "vllm_part")
    assert seams.difference() == "Reads.readinto is not there"


def test_outputs_say_what_the_decode_engine_itself_had_cached() -> None:
    """vLLM's own figure is what prefill had cached, or that and what was fetched."""
    said: list[Any] = []
    states = {"a": SimpleNamespace(remote_prefill_cached_tokens=640), "b": SimpleNamespace()}
    processor = SimpleNamespace(request_states=states, process_outputs=lambda outputs, stamp: said.append(stamp))
    versions.report_local_hits(SimpleNamespace(output_processor=processor))
    stats = SimpleNamespace(num_local_cached_tokens=96)
    outputs = [SimpleNamespace(request_id=id, prefill_stats=it) for id, it in (("a", stats), ("b", None), ("c", stats))]
    processor.process_outputs(outputs, 5.0)
    assert states["a"].remote_prefill_cached_tokens == 96
    assert not vars(states["b"])
    assert said == [5.0]


def test_a_speculating_rank_does_not_say_that_it_knows_what_vllm_then_refuses() -> None:
    client = client_of()
    known = set(main.rank_facts(versions.facts_of(client), 60.0).params)
    client.vllm_config.speculative_config = object()
    assert known - set(main.rank_facts(versions.facts_of(client), 60.0).params) == {"min_p", "logit_bias"}


def test_a_rank_says_what_its_engine_knows_of_reasoning() -> None:
    client = client_of()

    def known(role: Any = "unified") -> set[str]:
        return set(main.rank_facts(versions.facts_of(client), 60.0, role).params)

    plain = known()
    assert "prompt_logprobs" in plain
    assert plain - known("prefill") == plain - known("decode") == {"prompt_logprobs"}
    client.vllm_config.structured_outputs_config = SimpleNamespace(reasoning_parser="minimax_m2_append_think")
    parser = {"parser:minimax_m2_append_think", "reasoning_ended", "reasoning_parser_kwargs"}
    client.generate = lambda prompt, *, reasoning_ended=None: None
    assert known() == plain, "an older vLLM can't be told where reasoning ends"
    client.generate = lambda prompt, *, reasoning_ended=None, reasoning_parser_kwargs=None: None
    assert known() - plain == known("decode") - plain == parser
    client.vllm_config.reasoning_config = SimpleNamespace(enabled=True)
    assert known() - plain == parser | {"thinking_token_budget"}
    client.vllm_config.structured_outputs_config = SimpleNamespace(reasoning_parser="x" * 26)
    assert known() - plain == {"thinking_token_budget"}, "no word of the protocol is so long"


def test_an_engine_is_not_coupled_with_those_of_other_processes() -> None:
    """The first of them is rank 0, which is no "not given"."""
    versions.check_one_process(SimpleNamespace(data_parallel_rank=None, data_parallel_hybrid_lb=False))
    for said in ({"data_parallel_rank": 0}, {"data_parallel_start_rank": 8}, {"data_parallel_external_lb": True}):
        with pytest.raises(ConfigError, match=f"--{next(iter(said)).replace('_', '-')}: .* in one process"):
            versions.check_one_process(SimpleNamespace(**said))


def test_a_loaded_engine_says_how_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, Any] = {}
    monkeypatch.setattr(main, "log", SimpleNamespace(info=lambda event, **fields: said.update(fields, event=event)))
    client = client_of()
    client.vllm_config.use_v2_model_runner = True
    client.vllm_config.scheduler_config.async_scheduling = True
    main.log_loaded(versions.facts_of(client))
    assert said.items() >= {"event": "engine.loaded", "model_runner": "v2", "async_scheduling": True}.items()
    assert said.keys() >= {"kv_capacity", "max_running", "step_tokens", "block_tokens"}


def test_revisions_versions_and_connectors_are_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no length of what comes first cuts them off."""
    monkeypatch.setattr(versions, "installed", lambda: "0.32.0")

    def layout(**how: Any) -> str:
        return versions.facts_of(client_of(connector="X", **how)).kv_layout

    first = layout(commit="a" * 40)
    assert layout(commit="a" * 40) == first
    assert exchange(("X", first), ("X", first))
    assert not exchange(("X", first), ("X", layout(commit="b" * 40)))
    long = layout(commit="a" * 40, cache_dtype="f" * 200)
    assert len(long) == 128
    assert not exchange(("X", long), ("X", layout(commit="b" * 40, cache_dtype="f" * 200)))
    monkeypatch.setattr(versions, "installed", lambda: "0.33.0")
    assert not exchange(("X", first), ("X", layout(commit="a" * 40)))


def test_layouts_of_version_0_1_0_pair_as_before() -> None:
    """With each other, and with a later one's that begins as theirs."""
    new = versions.facts_of(client_of(connector="X")).kv_layout
    old = new.partition("#")[0]
    assert old == f"{fingerprint('/nowhere', {'eos_token_id': 2})}/bf16/auto/16"
    assert exchange(("X", old), ("X", old))
    assert exchange(("X", old), ("X", new))
    assert exchange(("X", new), ("X", old))
    assert not exchange(("X", old + "0"), ("X", new))
    assert not exchange(("Y", old), ("X", new))


def ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not ipv6_loopback(), reason="this machine has no IPv6")
def test_an_ipv6_address_of_data_is_one_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(versions.SIDE_PORT, raising=False)
    config = NodeConfig(
        role="decode", instance="d", bus="ipc:///tmp/pdx/b", controllers=("ipc:///tmp/pdx/c",), data="tcp://[::1]:5580",
        dp_size=1, dp_ranks=(0,),
    )  # fmt: skip
    choices = main._choices(config, 0)
    assert choices.host == "::1", "as vLLM wants it, which puts the brackets on"
    monkeypatch.setenv(versions.SIDE_PORT, str(free_ports("[::1]", 1)))
    assert main.side_ports("::1", 1)


def test_a_host_that_is_not_this_machines_is_not_a_taken_port(monkeypatch: pytest.MonkeyPatch) -> None:
    for port in (None, "5600"):
        monkeypatch.delenv(versions.SIDE_PORT, raising=False)
        if port:
            monkeypatch.setenv(versions.SIDE_PORT, port)
        with pytest.raises(StartError, match=r"192\.0\.2\.7 is no address of this machine"):
            main.side_ports("192.0.2.7", 1)


HOLDER = """
import sys
from pathlib import Path
from nodes.vllm.devices import alone_on
with alone_on(Path(sys.argv[1]), ["GPU-1"], 60, lambda device: print("waits", flush=True)):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_engines_of_one_gpu_load_one_after_the_other(tmp_path: Path) -> None:
    """And what a killed one held is free."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout.readline() == "holds\n"
        with subprocess.Popen(command, **pipes) as second:
            assert second.stdout.readline() == "waits\n"
            first.kill()
            assert second.stdout.readline() == "holds\n"
            second.kill()


def test_a_gpu_without_a_uuid_is_named_by_its_number_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by its place among those that this process sees: others see others."""

    class Platform:
        is_cpu = staticmethod(lambda: False)
        device_id_to_physical_device_id = staticmethod(lambda number: (3, 5)[number])

        @staticmethod
        def get_device_uuid(number: int) -> str:
            raise NotImplementedError

    platforms = ModuleType("vllm.platforms")
    monkeypatch.setattr(platforms, "current_platform", Platform, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    arguments = SimpleNamespace(
        kv_cache_memory_bytes=None, tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1
    )
    assert versions.devices(arguments) == ["3", "5"]


def test_engines_of_other_gpus_load_at_once_and_a_wait_has_an_end(tmp_path: Path) -> None:
    said: list[str] = []
    with alone_on(tmp_path, ["GPU-1", "GPU-0"], 60, said.append), alone_on(tmp_path, ["GPU-2"], 60, said.append):
        assert said == []
        with (
            pytest.raises(StartError, match=r"on GPU GPU-1 after 0 s; raise --wait-s, or .* --kv-cache-memory-bytes"),
            alone_on(tmp_path, ["GPU-1"], 0.0, said.append),
        ):
            raise AssertionError
    assert said == ["GPU-1"]
    with alone_on(tmp_path, [], 0.0, said.append):
        pass
    assert said == ["GPU-1"]
