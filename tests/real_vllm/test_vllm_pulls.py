"""The connector of ranks that keep what they read, over vLLM's own classes: without an engine, the attributes of
workers and schedulers set by hand."""

from __future__ import annotations

import json
import queue
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from bus.errors import ConfigError
from nodes.vllm import seams, versions
from nodes.vllm.safe_pulls import PINNED_PART, NixlConnector, SafeScheduler, SafeWorker
from nodes.vllm.sampling import HAND_OVER, PIN, READ_UNTIL
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
    one = scheduler()
    one._reqs_need_recv[RID] = (SimpleNamespace(kv_transfer_params=REMOTE | {READ_UNTIL: end}), (BLOCKS,), (0,), True)
    made = one.build_connector_meta(None)
    assert isinstance(made, NixlConnectorMetadata)
    return deepcopy(made)  # as pickle would, on its way to a worker


REMOTE: dict[str, Any] = {
    "remote_block_ids": ([1, 2, 3],), "remote_engine_id": "p", "remote_request_id": "p-0-1", "remote_host": "h",
    "remote_port": 1,
}  # fmt: skip


def scheduler(blocks: int = 60, *, back: bool = True, hybrid: bool = False, host: bool = False) -> SafeScheduler:
    """The connector's part in the scheduler of an engine with so many blocks."""
    made = object.__new__(SafeScheduler)
    made.__dict__.update(
        _most_pinned=blocks // PINNED_PART, _pinned={}, _pinned_blocks=Counter(), _reqs_need_recv={},
        _reqs_need_send={}, _reqs_need_save={}, _reqs_in_batch=set(), _reqs_not_processed=set(),
        _heartbeat_by_engine={}, _heartbeat_req_engine={}, use_host_buffer=host, is_bidirectional_kv_xfer_enabled=back,
        kv_recompute_threshold=0, _kv_lease_duration=60, decoder_kv_blocks_ttl=15, _is_hma_required=hybrid,
        _has_mamba=False, _bounded_replay=False, engine_id="d", side_channel_host="h", side_channel_port=1,
        transfer_tp_size=1, kv_cache_config=SimpleNamespace(select_transfer_block_ids=lambda ids: ids),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1),
            num_prefill_lookahead_tokens=0,
        ),
    )  # fmt: skip
    return made


def request_of(params: dict[str, Any] | None, rid: str = RID, tokens: int = 100) -> Any:
    return SimpleNamespace(
        request_id=rid, kv_transfer_params=params, status=RequestStatus.FINISHED_STOPPED, num_computed_tokens=tokens,
        num_prompt_tokens=tokens, prompt_token_ids=[1] * tokens,
    )  # fmt: skip


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


def blocks_of(*ids: int) -> Any:
    """What a request was given: blocks that are not in the prefix cache yet."""
    group = [SimpleNamespace(block_id=each, block_hash=None, is_null=False) for each in ids]
    return SimpleNamespace(blocks=(group,), get_unhashed_block_ids_all_groups=lambda: [list(ids)])


def test_a_prefill_engine_reads_once_and_computes_what_has_failed() -> None:
    """vLLM by itself would find the same tokens outside again, wait for them, and begin no read."""
    one = scheduler()
    one.get_exchange_clipped_blocks = lambda ids, clip_ssm=True: ids
    request = request_of(HAND_OVER | REMOTE | {"remote_num_tokens": 96, READ_UNTIL: 5.0})
    assert one.get_num_new_matched_tokens(request, 32) == (64, True)
    one.update_state_after_alloc(request, blocks_of(4, 7), 64)
    assert one.build_connector_meta(None).reqs_to_recv[RID].read_until == 5.0
    assert one.get_num_new_matched_tokens(request, 0) == (0, False), "it has failed, or was preempted"
    one.update_state_after_alloc(request, blocks_of(4, 7, 8), 0)
    assert not one.build_connector_meta(None).reqs_to_recv
    stock = super(SafeScheduler, one).get_num_new_matched_tokens(request, 0)
    assert stock == (96, True), "which nobody would fetch"
    params = HAND_OVER | REMOTE | {"remote_num_tokens": 96, READ_UNTIL: 5.0}
    assert scheduler(host=True).get_num_new_matched_tokens(request_of(params), 32) == (0, False)


def test_what_decode_pins_is_known_to_its_workers_bounded_and_counted(worker: Make) -> None:
    """Also of a leg that it has computed itself, which vLLM's own connector would pin for good. Blocks that requests
    share count once."""
    one, work = scheduler(60), worker()
    for rid, ids in (("a", [1, 2, 3]), ("b", [1, 2, 4]), ("c", [5, 6, 7, 8]), ("d", [5, 6])):
        request = request_of(dict(PIN), rid)
        assert one.get_num_new_matched_tokens(request, 0) == (0, False)
        one.update_state_after_alloc(request, blocks_of(*ids), 0)
        work.start_load_kv(one.build_connector_meta(None))
        assert rid in work._reqs_to_process
        pinned, handle = one.request_finished(request, (ids,))
        assert pinned == (rid != "c"), "of 60 blocks 6"
        assert (handle is None) == (rid == "c")
        work.start_load_kv(one.build_connector_meta(None))
        assert (rid in work._reqs_to_send) == (rid in work._reqs_to_process) == pinned
    assert handle is not None
    assert handle["remote_block_ids"] == ([5, 6],)
    assert (handle["do_remote_decode"], handle["remote_num_tokens"]) == (True, 100)
    assert 14.0 < handle["remote_blocks_expiry_time"] - time.perf_counter() <= 15.0
    assert len(one._pinned_blocks) == 6
    work._reqs_to_send["a"] = work._reqs_to_send["d"] = 0.0  # their time is over
    work.consumer_notification_counts_by_req = work.expected_consumer_notifications_by_req = {}
    work.xfer_stats.record_kv_expired_req = lambda: None
    done = work.get_transfer_results()
    assert done.finished_sending == {"a", "d"}
    one.update_connector_output(KVConnectorOutput(finished_sending=done.finished_sending))
    assert sorted(one._pinned_blocks) == [1, 2, 4]


def test_nothing_is_pinned_where_it_cannot_be_read_back() -> None:
    for one, blocks in (
        (scheduler(back=False), ([1],)), (scheduler(hybrid=True), ([1],)), (scheduler(), ([1], [2])),
        (scheduler(host=True), ([1],)),
    ):  # fmt: skip
        assert one.request_finished(request_of(dict(PIN)), blocks) == (False, None)
    one = scheduler()
    aborted = request_of(dict(PIN))
    aborted.status = RequestStatus.FINISHED_ABORTED
    assert one.request_finished(aborted, ([1],)) == (False, None)
    assert one._reqs_not_processed == {RID}
    assert not one._pinned_blocks
    kept, handle = one.request_finished(request_of(dict(HAND_OVER)), (list(range(40)),))
    assert (kept, handle and handle["do_remote_prefill"]) == (True, True), "a prompt's lease has no such bound"
    assert not one._pinned_blocks


def test_prefill_engines_read_back_where_that_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """As consumers too: only these keep freed blocks back while a step may still write to them."""
    off: list[str] = []
    monkeypatch.setattr(versions, "log", SimpleNamespace(info=lambda event, why: off.append(f"{event}: {why}")))
    choices = versions.Choices(
        role="prefill", ranks=1, engine_id="x", host="127.0.0.1", side_port=1, events_port=7, lease_s=60
    )

    def transfer(*arguments: str) -> Any:
        args = versions.engine_args(str(hugging_face()), "m", arguments, choices)
        assert args.kv_events_config is not None
        return args.kv_transfer_config

    safe = transfer()
    assert (safe.kv_role, safe.kv_load_failure_policy) == ("kv_both", "recompute")
    assert safe.kv_connector_module_path == versions.SAFE_PULLS
    assert safe.kv_connector_extra_config == {
        "kv_lease_duration": 60, "bidirectional_kv_xfer": True, "kv_recompute_threshold": 0,
        "decoder_kv_blocks_ttl": versions.PIN_S,
    }  # fmt: skip
    own = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    extra = {"bidirectional_kv_xfer": False, "decoder_kv_blocks_ttl": 3}
    given = transfer("--kv-transfer-config", json.dumps(own | {"kv_connector_extra_config": extra}))
    assert (given.kv_role, given.kv_load_failure_policy) == ("kv_producer", "fail")
    assert given.kv_connector_extra_config["decoder_kv_blocks_ttl"] == 3
    assert not off
    assert transfer("--no-enable-prefix-caching").kv_connector_module_path is None
    monkeypatch.setattr(seams, "difference", lambda: "RemoteMeta is not there")
    plain = transfer()
    assert (plain.kv_role, plain.kv_load_failure_policy) == ("kv_producer", "fail")
    assert plain.kv_connector_extra_config == {"kv_lease_duration": 60}
    why = f"vLLM {versions.installed()}: RemoteMeta is not there"
    assert off == ["read_back.off: --no-enable-prefix-caching", f"read_back.off: {why}"]


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
