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
        prefill.report(Load(0, 1, 1, 0, 128, 128, 8192, 16))  # and with each of its steps
        while not decode.wait(0.1):  # a scheduler would just poll once a step
            print("waiting for the room")
        for room, location in decode.poll().items():
            print(f"room {room} is prefilled by {location.instance}/{location.dp_rank} at {location.endpoint}")
        prefill.drop(4711)  # the KV cache was fetched
