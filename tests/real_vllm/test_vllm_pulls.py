"""The connector of decode ranks that keep their KV caches, over vLLM's own classes: without an engine, a worker's
attributes set by hand."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from bus.errors import ConfigError
from nodes.vllm import seams, versions
from nodes.vllm.safe_pulls import NixlConnector, SafeWorker
from nodes.vllm.smollm2 import hugging_face

RID = "d-0-1"
BLOCKS = [4, 7, 9]


class Nixl:
    """NIXL's agent, as far as it is asked: reads are handles, in the state that the test says."""

    def __init__(self) -> None:
        self.state = "PROC"
        self.released = 0

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def check_xfer_state(self, handle: int) -> str:
        return self.state

    def get_xfer_telemetry(self, handle: int) -> None: ...

    def release_xfer_handle(self, handle: int) -> None:
        self.released += 1


def metadata_of(end: float | None) -> NixlConnectorMetadata:
    """What a scheduler that has found space for the request tells its workers."""
    params = {
        "remote_block_ids": ([1, 2, 3],), "remote_engine_id": "p", "remote_request_id": "p-0-1", "remote_host": "h",
        "remote_port": 1, "remote_blocks_expiry_time": end,
    }  # fmt: skip
    made = NixlConnectorMetadata()
    made.add_new_req_to_recv(RID, (BLOCKS,), params, (0,), awaiting_kvs=True)
    return made


Make = Callable[[], SafeWorker]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes one, which begins a read by a handle alone."""

    def read(self: Any, rid: str, meta: Any) -> None:
        self._recving_transfers[rid].append(1)

    monkeypatch.setattr(SafeWorker.__mro__[1], "_read_blocks_for_req", read)
    monkeypatch.setattr(SafeWorker, "_cleanup_remote_engines", lambda self: None)
    return made


def made() -> SafeWorker:
    worker = object.__new__(SafeWorker)
    info = SimpleNamespace(remote_block_size=32, remote_physical_blocks_per_logical=1)
    topology = SimpleNamespace(get_engine_info=lambda engine: info, block_size_ratio=lambda size: 1)
    worker.__dict__.update(
        nixl_wrapper=Nixl(), transfer_topo=topology, xfer_stats=SimpleNamespace(record_transfer=lambda result: None),
        _recving_metadata={}, _recving_transfers=defaultdict(list), _recv_failures=set(), _pending_recv_notifs={},
        _failed_recv_reqs=queue.Queue(), _invalid_block_ids=queue.Queue(), _ready_requests=queue.Queue(),
        _replicated_pcp_done_sending=set(), _reqs_to_send={}, _reqs_to_process=set(), _is_hma_required=False,
        _physical_blocks_per_logical_kv_block=1, use_host_buffer=False, enable_permute_local_kv=False,
        enable_heterogeneous_attn_post_process=False, tp_rank=0, pcp_rank=0, _failed_remote_engines=set(),
    )  # fmt: skip
    return worker


def results(worker: SafeWorker) -> tuple[set[str], set[str], set[int]]:
    """What came, what of it has failed, and its blocks, as a worker reports them after a step."""
    found = worker.get_transfer_results()
    return found.finished_recving, found.failed_recving, worker.get_block_ids_with_load_errors()


def test_what_this_leans_on_is_as_it_was_read() -> None:
    assert seams.difference() == ""
    assert NixlConnector.__name__ == "NixlConnector", "vLLM treats it as its own by this name"


def test_a_read_that_ends_in_time_is_used_and_a_late_one_has_failed(worker: Make) -> None:
    for left_s, late in ((60.0, False), (0.2, True)):
        one = worker()
        one.start_load_kv(metadata_of(time.perf_counter() + left_s))
        assert results(one) == (set(), set(), set()), "it is under way"
        time.sleep(0.3)
        assert results(one) == (set(), set(), set()), "what may still be written to is kept, late or not"
        one.nixl_wrapper.state = "DONE"
        assert results(one) == ({RID}, {RID} if late else set(), set(BLOCKS) if late else set())
        assert one.nixl_wrapper.released == 1
        assert results(one) == (set(), set(), set()), "said once"


@pytest.mark.parametrize("end", [None, 0.0])
def test_a_read_that_is_late_or_of_which_no_lease_is_known_is_not_begun(worker: Make, end: float | None) -> None:
    one = worker()
    one.start_load_kv(metadata_of(end))
    assert not one._recving_transfers
    assert results(one) == ({RID}, {RID}, set(BLOCKS))


def test_what_was_told_to_a_worker_that_stood_still_is_late(worker: Make) -> None:
    """The metadata lay there; a clock that is set by when they are read would give the lease's rest from then on."""
    one, told = worker(), metadata_of(time.perf_counter() + 0.2)
    told.scheduler_clock = time.perf_counter()
    time.sleep(0.3)
    one.start_load_kv(told)
    assert results(one) == ({RID}, {RID}, set(BLOCKS))


@pytest.mark.parametrize("late", [0, 1])
def test_one_late_worker_of_several_fails_the_request(worker: Make, late: int) -> None:
    """As vLLM puts the workers' reports together: whichever it is, and however they follow each other."""
    aggregator, workers = KVOutputAggregator(2), [worker(), worker()]

    def step() -> KVConnectorOutput:
        outputs = []
        for each in workers:
            came, failed, blocks = results(each)
            said = KVConnectorOutput(finished_recving=came, failed_recving=failed, invalid_block_ids=blocks)
            outputs.append(ModelRunnerOutput.with_kv_conn_output_only(said))
        found = aggregator.aggregate(outputs)
        assert found is not None
        assert found.kv_connector_output is not None
        return found.kv_connector_output

    for each in workers:
        each.start_load_kv(metadata_of(time.perf_counter() + 0.2))
    workers[1 - late].nixl_wrapper.state = "DONE"  # in time
    assert not step().finished_recving, "the other one reads still"
    time.sleep(0.3)
    workers[late].nixl_wrapper.state = "DONE"
    ended = step()
    assert ended.finished_recving == ended.failed_recving == {RID}
    assert ended.invalid_block_ids == set(BLOCKS)


def test_decode_engines_keep_kv_caches_where_that_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """And publish what they keep. Where it is not, they are what they are without the option, and say why."""
    off: list[str] = []
    monkeypatch.setattr(versions, "log", SimpleNamespace(warning=lambda event, why: off.append(why)))
    choices = versions.Choices(
        role="decode", ranks=1, engine_id="x", host="127.0.0.1", side_port=1, events_port=7, lease_s=60,
        decode_cache=True,
    )  # fmt: skip

    def keeps(choices: versions.Choices, *arguments: str) -> bool:
        args = versions.engine_args(str(hugging_face()), "m", arguments, choices)
        assert args.kv_transfer_config.kv_connector == "NixlConnector"
        safe = bool(args.kv_transfer_config.kv_connector_module_path == versions.SAFE_PULLS)
        assert safe == (args.enable_prefix_caching is not False) == (args.kv_events_config is not None)
        return safe

    assert keeps(choices)
    assert keeps(choices, "--enable-prefix-caching")
    assert not off
    assert not keeps(replace(choices, decode_cache=False, events_port=0))
    assert not off, "nobody asked"
    assert not keeps(choices, "--no-enable-prefix-caching")
    monkeypatch.setattr(seams, "difference", lambda: "RemoteMeta is not there")
    assert not keeps(choices)
    assert off == ["--no-enable-prefix-caching", f"vLLM {versions.installed()}: RemoteMeta is not there"]
    with pytest.raises(ConfigError, match="a decode rank keeps prefixes with --decode-cache, before the --"):
        keeps(replace(choices, decode_cache=False), "--enable-prefix-caching")
