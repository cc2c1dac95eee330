"""vLLM's NIXL connector for decode ranks that keep their KV caches: a pull that ends after its lease has failed.

After a lease the prefill engine uses the prompt's memory for others, and a read gives no error. vLLM's own connector
would take what came for the prompt's KV cache and keep it, under the prompt's hashes. Here such a read counts as
failed, so its blocks take no hash, and one that is late before it begins is not begun. Of several workers (tensor
parallel) one late read fails the request, as any failed read does in vLLM.

The lease's end comes with each request as `remote_blocks_expiry_time`, on this machine's clock (`time.perf_counter`),
which node, scheduler and workers share: so it holds for a worker that stood still before it was told, too. vLLM loads
this module in its engine's processes, by `kv_connector_module_path`. `nodes.vllm.seams` has what it leans on.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector, NixlPullConnectorWorker
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, whose handler it has


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """The connector; vLLM knows it by the name of its own, which it treats apart from others."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            self.connector_worker = SafeWorker(vllm_config, self.engine_id, kv_cache_config)


class SafeWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """The part of it in each worker, which reads."""

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        if meta.awaiting_kvs and _is_over(meta):
            logger.warning("The KV cache of %s is not fetched: its lease is over", req_id)
            self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)
        else:
            super()._read_blocks_for_req(req_id, meta)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        late = {req_id for req_id in done if _is_over(self._recving_metadata[req_id])}
        if late:
            logger.warning("KV caches came after their lease, and are dropped: %s", ", ".join(sorted(late)))
        return done, failed | late


def _is_over(meta: Any) -> bool:
    """Return true if the lease is over; one that was not stated is."""
    end: float | None = meta.remote.blocks_expiry_time
    return end is None or time.perf_counter() >= end
