"""Two schedulers' loops, as an engine would write them: one registers a room and its load, one finds the room."""

from __future__ import annotations

import tempfile

from bus import Broker, Load, Publisher, Resolver

with tempfile.TemporaryDirectory(prefix="pd") as folder, Broker(f"ipc://{folder}/bus") as broker:
    rank = Publisher(
        broker.address, instance="prefill-0", dp_rank=3, dp_size=8, role="prefill", endpoint="tcp://10.0.0.7:7000"
    )
    with rank as prefill, Resolver(broker.address) as decode:
        decode.want(4711, deadline_s=2.0)  # the decode leg may well ask before the prefill leg has begun
        prefill.register(4711)  # in the prefill scheduler's loop, when it takes the request in
        prefill.report(  # and with each of its steps
            Load(
                seq=0,
                step=1,
                running=1,
                waiting=0,
                waiting_tokens=128,
                kv_tokens=128,
                kv_capacity=8192,
                max_running=16,
            )
        )
        while not decode.wait(0.1):  # a scheduler would just poll once a step
            print("waiting for the room")
        for room, location in decode.poll().items():
            print(f"room {room} is prefilled by {location.instance}/{location.dp_rank} at {location.endpoint}")
        prefill.drop(4711)  # the KV cache was fetched
