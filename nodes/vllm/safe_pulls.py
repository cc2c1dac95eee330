"""vLLM's NIXL connector for ranks that keep what they fetch: a read that ends after its time has failed.

Decode ranks with KV caches of their own fetch what they lack of a prompt from prefill, and prefill ranks read back what
decode has generated. The engine at the other end keeps that for a while (a prompt for its lease, what decode has left
for PIN_S) and then uses the memory for others, and a read gives no error. vLLM's own connector would take what came for
the prompt's KV cache and keep it, under the prompt's hashes. Here such a read counts as failed, so its blocks take no
hash, and one that is late before it begins is not begun. Of several workers (tensor parallel) one late read fails the
request, as any failed read does in vLLM: at decode the leg fails, at prefill it is computed.

The end of that time comes with each request as READ_UNTIL, on this machine's clock (`time.perf_counter`), which node,
scheduler and workers share: so it holds for a worker that stood still before it was told, too. vLLM loads this module
in its engine's processes, by `kv_connector_module_path`. `nodes.vllm.seams` has what it leans on.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnector,
    NixlPullConnectorScheduler,
    NixlPullConnectorWorker,
)
from vllm.logger import init_logger

from nodes.vllm.sampling import READ_UNTIL

PINNED_PART = 10  # what finished legs keep for reads is this part of the KV memory at most

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, whose handler it has


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """The connector; vLLM knows it by the name of its own, which it treats apart from others."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            self.connector_worker = SafeWorker(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_scheduler = SafeScheduler(vllm_config, self.engine_id, kv_cache_config)


class SafeScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """The part of it in the scheduler, which says until when each read is good, and bounds what is pinned."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._most_pinned = kv_cache_config.num_blocks // PINNED_PART
        self._pinned: dict[str, list[int]] = {}  # blocks by request
        self._pinned_blocks: Counter[int] = Counter()  # how many requests pin each

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Read for a request once alone: what has failed, or was preempted, is computed. vLLM would wait for another
        read of a prefill request, and begin none; nor does it begin one into a buffer on the host."""
        params = request.kv_transfer_params or {}
        if params.get("_remote_blocks_processed") or (self.use_host_buffer and params.get("do_remote_decode")):
            return 0, False
        found: tuple[int, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Let the workers know each request that may be pinned: one that decode computes itself, too, of which vLLM's
        own would never free the blocks."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.kv_transfer_params and self.is_bidirectional_kv_xfer_enabled:
            self._reqs_in_batch.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Add to each read until when it is good."""
        until = {each: entry[0].kv_transfer_params.get(READ_UNTIL) for each, entry in self._reqs_need_recv.items()}
        made = super().build_connector_meta(scheduler_output)
        for each, meta in made.reqs_to_recv.items():
            meta.read_until = until[each]
        return made

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Pin a decode request's blocks for a prefill engine to read, unless too much is pinned, layers differ, or
        others read a buffer on the host, which has not what was generated."""
        params = request.kv_transfer_params or {}
        decodes = params and not params.get("do_remote_decode") and not params.get("do_remote_prefill")
        if not decodes or not self.is_bidirectional_kv_xfer_enabled:
            return self._finished(request, block_ids)
        alike = len(block_ids) == 1 and not self._is_hma_required and not self.use_host_buffer
        blocks = block_ids[0] if alike else None
        fresh = sum(each not in self._pinned_blocks for each in blocks or ())
        if blocks is None or len(self._pinned_blocks) + fresh > self._most_pinned:
            self._stop_heartbeat(request.request_id)
            self._reqs_not_processed.add(request.request_id)
            return False, None
        pins, handle = self._finished(request, block_ids)
        if pins:
            self._pinned[request.request_id] = list(blocks)
            self._pinned_blocks.update(blocks)
        return pins, handle

    def update_connector_output(self, connector_output: Any) -> None:
        """Take off what is pinned no longer: it was read, or its time is over."""
        super().update_connector_output(connector_output)
        for each in connector_output.finished_sending or ():
            for block in self._pinned.pop(each, ()):
                self._pinned_blocks[block] -= 1
                if not self._pinned_blocks[block]:
                    del self._pinned_blocks[block]

    def _finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        found: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return found


class SafeWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """The part of it in each worker, which reads."""

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        if meta.awaiting_kvs and _is_over(meta):
            logger.warning("The KV cache of %s is not read: its time is over", req_id)
            self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)
        else:
            super()._read_blocks_for_req(req_id, meta)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        late = {req_id for req_id in done if _is_over(self._recving_metadata[req_id])}
        if late:
            logger.warning("KV caches came after their time, and are dropped: %s", ", ".join(sorted(late)))
        return done, failed | late


def _is_over(meta: Any) -> bool:
    """Return true if what is read may be used for others by now; where no time was stated, it may."""
    end: float | None = getattr(meta, "read_until", None)
    return end is None or time.perf_counter() >= end
