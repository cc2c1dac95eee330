"""The streams of the bus, as data: who sends each, by symbol, how it is dropped there, and the test that sees it gone.

A stream is a message of a wire's table (`bus.wire.messages`), a topic of other contents, or what is carried by none of
its own. Imports nothing of pdbus: each process that is tapped imports this first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Sender = Literal["rank", "broker", "controller", "client", "keys"]

PUBLISH = ("nodes.link.host:Host.publish", "bus.embed.publisher:Publisher._publish")
RESOLVE = ("nodes.link.host:Host._resolve", "bus.embed.resolver:Resolver._send")
CONNECTION = ("nodes.link.connection:Connection.send",)
CONTROLLER = ("controller.traffic:Traffic._send",)
BROKER = ("bus.broker.shell:Broker._send",)
CLIENT = ("pdbus.client.traffic:Traffic._send",)


@dataclass(frozen=True)
class Stream:
    """`how` it is dropped: a message among the arguments of a sender, or what carries one (`arguments`); the call of
    the sender (`call`); among what it returns (`returned`); `acks` are taken out of a load. `returns` is what the
    sender says then. `alone`: nothing else is lost with it, so all other tests still pass."""

    name: str  # TABLE/TAG, or its own
    by: Sender
    senders: tuple[str, ...]
    test: str  # of test_streams.py
    how: Literal["arguments", "call", "returned", "acks"] = "arguments"
    returns: Any = None
    topic: bytes = b""
    socket: str = ""  # the attribute of the sender with the socket that is meant, where it sends the same over others
    alone: bool = True

    @property
    def tag(self) -> str:
        return self.name.partition("/")[2]


def _named(table: str, by: Sender, senders: tuple[str, ...], tags: str, needed: str = "", **more: Any) -> list[Stream]:
    return [
        Stream(f"{table}/{tag}", by, senders, f"test_{tag}", alone=tag not in needed.split(), **more)
        for tag in tags.split()
    ]


_ALL = [
    *_named("publications", "rank", PUBLISH, "load rooms member", "load rooms member"),
    Stream("topics/kv", "rank", ("nodes.link.host:Host.publish_frames",), "test_kv_events", topic=b"kv/"),
    Stream(
        "acknowledgements", "rank", ("bus.embed.publications:PublisherCore.report",), "test_acknowledgements", "acks"
    ),
    Stream("spans", "rank", ("bus.runtime.spans:Spans.add",), "test_spans", "call"),
    *_named(
        "node_to_controller", "rank", CONNECTION, "hello pong progress bye recalled recorded",
        "hello pong progress recorded",
        returns=True,
    ),
    *_named("to_node_data", "rank", ("nodes.link.data:KvPeers.request",), "kv_pull kv_done", "kv_pull kv_done"),
    Stream(
        "from_node_data/tokens", "rank", ("nodes.link.streams:Streams.flush",), "test_tokens", "returned", alone=False
    ),
    Stream("from_node_data/kv_block", "rank", ("nodes.link.data:KvPeers.serve",), "test_kv_block", "call", alone=False),
    *_named("from_node_data", "rank", ("nodes.link.host:Host.answer",), "kv_meta kv_fail", "kv_meta"),
    *_named("to_broker", "rank", RESOLVE, "query unwatch topology", "query topology"),
    *_named("publications", "broker", ("bus.broker.shell:Broker._do",), "beacon resync conflict", "beacon"),
    *_named("from_broker", "broker", BROKER, "answer instances broker_counts", "answer instances"),
    Stream("from_broker/refused", "broker", BROKER, "test_refused_by_a_broker"),
    Stream("publications/sent", "controller", ("controller.traffic:Traffic._publish",), "test_sent"),
    *_named(
        "controller_to_node", "controller", CONTROLLER, "welcome who ping dispatch cancel_leg drain recall record",
        "welcome ping dispatch drain recall cancel_leg record", returns=0,
    ),
    Stream(
        "controller_to_node/refused", "controller", CONTROLLER, "test_refused_to_a_node", returns=0, socket="_nodes"
    ),
    *_named(
        "controller_to_client", "controller", CONTROLLER, "accepted failed done status_is trace_is",
        "accepted failed done status_is", returns=0,
    ),
    Stream("controller_to_client/recorded", "controller", CONTROLLER, "test_recorded_to_a_client", returns=0,
           socket="_clients"),
    Stream(
        "controller_to_client/refused", "controller", CONTROLLER, "test_refused_to_a_client", returns=0,
        socket="_clients",
    ),
    *_named(
        "client_to_controller", "client", CLIENT, "submit cancel status trace drain_rank drain_role",
        "submit cancel status trace drain_rank drain_role",
    ),
    Stream("client_to_controller/record", "client", CLIENT, "test_record_of_a_client", alone=False),
    *_named("to_node_data", "client", CLIENT, "attach detach", "attach"),
    Stream(
        "to_broker/broker_status", "client", ("pdbus.fleet.source:BrokerStatusClient.ask",), "test_broker_status",
        "call", alone=False,
    ),
    Stream(
        "revocations of who connects", "keys", ("bus.runtime.connection_limiter:ConnectionLimiter.hang_up_on",),
        "test_revoked_node", "call",
    ),
    Stream(
        "revocations of ports", "keys", ("bus.runtime.peer_keys:PeerKeys.look",), "test_revoked_controller", "call",
    ),
]  # fmt: skip
STREAMS = {stream.name: stream for stream in _ALL}

NOT_SENT = {
    "from_node_data/refused": "no rank of ours sends it; a client reads it",
    "params/params": "a frame of submit and dispatch",
}

KEYS = frozenset(name for name, stream in STREAMS.items() if stream.by == "keys")
RANK = frozenset(name for name, stream in STREAMS.items() if stream.by == "rank")
# Without these no node becomes ready: a run in which one is dropped waits no longer for it than it must.
NO_START = ("node_to_controller/hello", "controller_to_node/welcome", "publications/member", "publications/beacon")

# What can be dropped in one run, as each still has its occasion: the runs of CI. All others are dropped one by one.
TOGETHER = (
    ("topics/kv", "spans", "to_broker/unwatch", "node_to_controller/recalled", "node_to_controller/bye",
     "acknowledgements", "from_node_data/kv_fail"),
    ("publications/resync", "publications/conflict", "publications/sent", "controller_to_client/trace_is",
     "from_broker/broker_counts", "from_broker/refused", "controller_to_node/who", "controller_to_node/refused",
     "controller_to_client/refused", "controller_to_client/recorded", "to_node_data/detach"),
    ("from_node_data/tokens", "to_node_data/kv_done", "publications/load", "publications/rooms",
     "to_broker/query", "to_broker/topology", "node_to_controller/progress"),
    ("node_to_controller/hello", "publications/member"),
    ("client_to_controller/drain_rank", "client_to_controller/trace", "client_to_controller/record",
     "to_broker/broker_status"),
    ("to_node_data/attach", "client_to_controller/drain_role"),
    ("controller_to_node/drain", "controller_to_node/recall", "controller_to_node/record", "controller_to_node/ping",
     "controller_to_node/cancel_leg"),
    ("controller_to_client/failed", "controller_to_client/done", "node_to_controller/recorded"),
)  # fmt: skip

# What ranks of each engine send. Broker, controller and client know no engine: their streams are looked at beside sim.
ENGINES = {
    "sim": frozenset(STREAMS) - KEYS,
    "sim-keys": KEYS,
    "numpy": RANK,
    "torch": RANK,
    "smollm2": RANK,
    "sglang": frozenset(f"publications/{tag}" for tag in ("load", "rooms", "member"))
    | {"acknowledgements", "to_broker/query", "to_broker/topology"},  # all that the plugin sends
    "vllm": RANK - {"from_node_data/kv_block"},  # its KV caches travel by NIXL
}
