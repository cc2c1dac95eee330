"""An engine process that is the broker too: `with Broker(...)` serves from threads of its own."""

from __future__ import annotations

import tempfile

from bus import Broker, Publisher

with tempfile.TemporaryDirectory(prefix="pd") as folder, Broker(f"ipc://{folder}/bus") as broker:
    print(f"bootstrap queries are answered at {broker.address.bootstrap}")
    with Publisher(broker.address, instance="prefill-0", dp_rank=0, role="prefill") as publisher:
        print("the broker is heard by publishers:", publisher.wait_ready(30.0))
