"""The parts of vLLM that ranks lean on which keep what they read of others (`nodes.vllm.safe_pulls`), and the check
that they are as they were read.

That no late KV cache is kept follows from how vLLM counts failed reads, in its workers and its scheduler, and no
promise says so. So not names alone are compared but the source text of each function. `python -m nodes.vllm.seams`
prints the table for the vLLM that is installed: after reading what differs, put it here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from hashlib import blake2b
from importlib import import_module
from typing import Any, NamedTuple

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_SCHEDULER, _WORKER = "vllm.v1.core.sched.scheduler", "vllm.v1.worker"


class Seam(NamedTuple):
    """A function or class `name` of `module`; `source` is a hash of its text."""

    module: str
    name: str
    source: str


SEAMS = (  # of 0.32
    # the worker: a read is begun here, found done here, and reported as failed
    Seam(f"{_NIXL}.connector", "NixlPullConnector.__init__", "8482bb82"),
    Seam(f"{_NIXL}.connector", "NixlPullConnector.start_load_kv", "85f2500e"),
    Seam(f"{_NIXL}.connector", "NixlBaseConnector.get_transfer_results", "e1137ae5"),
    Seam(f"{_NIXL}.connector", "NixlBaseConnector.get_block_ids_with_load_errors", "1acb6b6f"),
    Seam(f"{_NIXL}.metadata", "RemoteMeta", "ad0e5627"),
    Seam(f"{_NIXL}.metadata", "ReqMeta", "ed834758"),
    Seam(f"{_NIXL}.metadata", "NixlConnectorMetadata.add_new_req_to_recv", "48cea5ff"),
    Seam(f"{_NIXL}.pull_worker", "NixlPullConnectorWorker.__init__", "6d06c849"),
    Seam(f"{_NIXL}.pull_worker", "NixlPullConnectorWorker.start_load_kv", "c574ecc2"),
    Seam(f"{_NIXL}.pull_worker", "NixlPullConnectorWorker._read_blocks_for_req", "0494aa83"),
    Seam(f"{_NIXL}.pull_worker", "NixlPullConnectorWorker._read_blocks", "7e411607"),
    Seam(f"{_NIXL}.base_worker", "NixlBaseConnectorWorker.get_transfer_results", "218074fd"),
    Seam(f"{_NIXL}.base_worker", "NixlBaseConnectorWorker.get_block_ids_with_load_errors", "0e0a6acf"),
    Seam(f"{_NIXL}.base_worker", "NixlBaseConnectorWorker._pop_done_transfers", "ec75602e"),
    Seam(f"{_NIXL}.base_worker", "NixlBaseConnectorWorker._handle_failed_transfer", "c6aadac6"),
    Seam(f"{_NIXL}.base_worker", "NixlBaseConnectorWorker._apply_prefix_caching", "5c73dea6"),
    # what is pinned: counted from here, freed by a read or when its time is over
    Seam(f"{_NIXL}.pull_worker", "NixlPullConnectorWorker._get_new_notifs", "92fe6050"),
    Seam(f"{_NIXL}.pull_worker", "NixlPullConnectorWorker._is_turn2_read_expired", "9e752689"),
    Seam(f"{_NIXL}.base_worker", "NixlBaseConnectorWorker._reap_expired_send_leases", "a9121c3a"),
    Seam(f"{_NIXL}.pull_scheduler", "NixlPullConnectorScheduler.request_finished", "0f40d552"),
    Seam(f"{_NIXL}.base_scheduler", "NixlBaseConnectorScheduler.__init__", "a112bf22"),
    Seam(f"{_NIXL}.base_scheduler", "NixlBaseConnectorScheduler._stop_heartbeat", "7fa8815a"),
    Seam(f"{_NIXL}.base_scheduler", "NixlBaseConnectorScheduler.build_connector_meta", "9ca7a438"),
    Seam(f"{_NIXL}.base_scheduler", "NixlBaseConnectorScheduler.update_connector_output", "6448d42c"),
    Seam(_SCHEDULER, "Scheduler._connector_finished", "7ae23c07"),
    # on its way to the scheduler: one worker's failure is the request's
    Seam(
        f"{_WORKER}.kv_connector_model_runner_mixin", "KVConnectorModelRunnerMixin._get_kv_connector_output", "dd3cdb53"
    ),
    Seam(f"{_WORKER}.gpu.kv_connector", "ActiveKVConnector.post_forward", "eec595e4"),
    Seam("vllm.distributed.kv_transfer.kv_connector.utils", "KVOutputAggregator.aggregate", "16413fd8"),
    # the scheduler: what is read is one request's alone until it has come, and takes no hash where that failed
    Seam(f"{_NIXL}.pull_scheduler", "NixlPullConnectorScheduler.get_num_new_matched_tokens", "54c8bd48"),
    Seam(f"{_NIXL}.pull_scheduler", "NixlPullConnectorScheduler.update_state_after_alloc", "0b1b1ef3"),
    Seam("vllm.v1.core.kv_cache_manager", "KVCacheBlocks.get_unhashed_block_ids_all_groups", "b8caa7c1"),
    Seam(_SCHEDULER, "Scheduler.__init__", "edf23f91"),  # which engines free no block that a step may still write to
    Seam(_SCHEDULER, "Scheduler._free_request_blocks", "2095afa2"),
    Seam(_SCHEDULER, "Scheduler._request_blocks_can_be_freed", "15fee38f"),
    Seam(_SCHEDULER, "Scheduler._update_waiting_for_remote_kv", "9567c3ee"),
    Seam(_SCHEDULER, "Scheduler._update_from_kv_xfer_finished", "e3ed8018"),
    Seam(_SCHEDULER, "Scheduler._handle_failed_recving", "e5e9d4b6"),
    Seam(_SCHEDULER, "Scheduler._handle_invalid_blocks", "0ed6903b"),
    Seam(_SCHEDULER, "Scheduler._update_requests_with_invalid_blocks", "b90c5d12"),
    # the node: how many tokens of a prompt were in the rank's own cache
    Seam("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs", "42cfdde8"),
    Seam("vllm.v1.metrics.stats", "PrefillStats", "3577ec2b"),
)


def difference() -> str:
    """Return the first difference between this vLLM and SEAMS, as a clause; empty: there is none. It imports modules
    of vLLM's."""
    return next((f"{seam.name} {how}" for seam, how in _differences()), "")


def _differences() -> Iterator[tuple[Seam, str]]:
    for seam in SEAMS:
        try:
            if _hash(seam) != seam.source:
                yield seam, "is not as pdbus knows it"
        except (ImportError, AttributeError):
            yield seam, "is not there"
        except (OSError, TypeError):
            yield seam, "has no source text here"


def _hash(seam: Seam) -> str:
    found: Any = import_module(seam.module)
    for part in seam.name.split("."):
        found = getattr(found, part)
    return blake2b(inspect.getsource(inspect.unwrap(found)).encode(), digest_size=4).hexdigest()


if __name__ == "__main__":
    for each in SEAMS:
        print(each.module, each.name, _hash(each))
