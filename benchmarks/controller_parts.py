"""Our controller's core with many ranks, in this process: what `report` measures and the counts of instructions
(`scripts`) guard."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.pick import INSTANCE
from bus.wire import codec, topics
from bus.wire.messages import PUBLICATIONS, Ack, Hello, Load, LoadReport, Role
from controller.config import ControllerConfig
from controller.core import ControllerCore
from controller.events import FromNode, Published
from controller.load.groups import Metric

MODEL = "m"


def core_of(ranks: int, method: str = "total_tokens", role: Role = "unified") -> ControllerCore:
    """Return a controller's core that knows `ranks` idle ranks of one instance, which have reported, at time 0."""
    core = ControllerCore(ControllerConfig(unified_method=method, prefill_method=method, decode_method=method), 1, 0.0)
    join(core, ranks, role, INSTANCE)
    return core


def join(core: ControllerCore, ranks: int, role: Role, instance: str) -> None:
    """Add `ranks` idle ranks of one more instance to the core. Each has its (instance, number) as connection, or in
    INSTANCE its number."""
    for dp_rank in range(ranks):
        peer = dp_rank if instance == INSTANCE else (instance, dp_rank)
        hello = Hello(
            instance=instance, dp_rank=dp_rank, epoch=1, role=role, model=MODEL, dp_size=ranks, state="ready",
            endpoint="ipc:///nowhere", max_context=1 << 20, kv_capacity=0, max_running=0, block_tokens=16,
        )  # fmt: skip
        core.handle(FromNode(peer, hello), 0.0)
        load = Load(
            seq=1, step=0, running=0, waiting=0, waiting_tokens=0, kv_tokens=0, kv_capacity=1 << 20,
            max_running=256, acks=(Ack(1, 0, 0),),
        )  # fmt: skip
        core.handle(Published(LoadReport(instance, dp_rank, 1, 1, load)), 0.0)
    assert core.table.group(role, MODEL).least(Metric.TOKENS) is not None


def publication_handler(ranks: int) -> Callable[[tuple[bytes, bytes]], None]:
    """Return a function that does what a controller with `ranks` ranks does with one publication (topic and frame):
    check its topic, decode, validate, apply."""
    core = core_of(ranks)

    def handle(frames: tuple[bytes, bytes]) -> None:
        message = codec.decode(frames[1], PUBLICATIONS)
        assert topics.of(message) == frames[0]
        core.handle(Published(message), 0.0)

    return handle
