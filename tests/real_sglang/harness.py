"""A plugin for the servers of these tests: the one switch that Mooncake's sender needs on a CPU, and a count.

SGLang hands Mooncake page numbers in pinned host memory, which a machine without a GPU has not. And each request to the
bootstrap server's `/query_dp_ranks` leaves a line in the file `PDBUS_TEST_QUERIES`.
"""

from __future__ import annotations

import os
import sys


def load() -> None:
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        MooncakeKVSender.supports_host_tensor_indices = False
    if queries := os.environ.get("PDBUS_TEST_QUERIES"):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def count(*_args: object) -> None:
            with open(queries, "a") as file:
                file.write("asked\n")

        target = "sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._handle_query_dp_ranks"
        HookRegistry.register(target, count, HookType.BEFORE)
