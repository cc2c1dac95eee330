"""What ranks at work publish in the `controllers` benchmark was encoded beforehand, and equals what would be now."""

from __future__ import annotations

from benchmarks.busy import NUMBER, prepared
from bus.wire import codec
from bus.wire.messages import PUBLICATIONS, Ack, Load, LoadReport


def test_a_prepared_frame_is_what_would_have_been_encoded() -> None:
    def report(number: int) -> LoadReport:
        load = Load(
            seq=number, step=number, running=1, waiting=0, waiting_tokens=0, kv_tokens=9, kv_capacity=1 << 40,
            max_running=8, acks=(Ack(7, 1, 128),),
        )  # fmt: skip
        return LoadReport("bench", 3, 5, number, load)

    topic, frame, places = prepared(report(NUMBER))
    for place in places:
        frame[place : place + 8] = (NUMBER + 41).to_bytes(8, "big")
    assert len(places) == 3
    assert topic == b"load/bench/3/"
    assert bytes(frame) == codec.encode(report(NUMBER + 41))
    assert codec.decode(bytes(frame), PUBLICATIONS) == report(NUMBER + 41)
