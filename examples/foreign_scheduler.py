"""A pdbus rank written from docs/protocol.md alone: pyzmq and msgpack, nothing of pdbus.

    python examples/foreign_scheduler.py --bus BASE --controller BASE --instance mine --role unified
    python examples/foreign_scheduler.py --bus BASE --controller BASE --instance mine --role prefill

As `unified` it runs whole requests and streams their tokens. As `prefill` it registers rooms, computes "KV caches" and
serves them to decode ranks. Its model is a toy that anybody can check: the state after a token is crc32(the token as
int32 little-endian, the state before), the next token is 3 + state % 509, and a KV block holds the state after each of
its 16 tokens, uint32 little-endian: the layout of pdbus's sim engine, whose decode ranks can go on from it.
SIGTERM drains: nothing new is taken, what runs is finished, then it says goodbye and leaves with exit code 0.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import msgpack
import zmq

VERSION = b"\x01"
BLOCK, VOCABULARY, CONTEXT, CAPACITY, SLOTS = 16, 512, 65536, 65536, 8
Sock = zmq.Socket[bytes]
now = time.monotonic


def encode(*fields: Any) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return VERSION + packed


def decode(frame: bytes) -> list[Any]:
    """Tag and fields; a single empty tag for what is not a message of version 1."""
    try:
        fields = msgpack.unpackb(frame[1:]) if frame[:1] == VERSION else [""]
        return fields if isinstance(fields, list) and fields else [""]
    except Exception:
        return [""]


def padded(fields: list[Any], required: int, *defaults: Any) -> list[Any]:
    """`required` fields and then those with a default, which a peer may leave out; newer ones are cut off."""
    return fields[: required + len(defaults)] + list(defaults[len(fields) - required :])


@dataclass
class Leg:
    """One dispatched leg; `ids` are its output, from index `offset` on."""

    controller: Sock
    rid: str
    attempt: int
    room: int | None
    prompt: list[int]
    max_tokens: int
    offset: int
    ids: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)  # the KV cache, one state a token
    reader: bytes | None = None  # unified: who reads; prefill: who pulls
    sent: int = 0
    last_seen_at: float = 0.0  # prefill: of who pulls
    finish: str = ""
    code: str = "ok"
    closed_at: float = 0.0

    @property
    def alive(self) -> bool:
        return not self.finish


class Rank:
    def __init__(self, options: argparse.Namespace) -> None:
        self.o = options
        self.epoch = secrets.randbelow(2**63 - 1) + 1
        self.key = (options.instance, options.dp_rank, self.epoch)  # how nearly every message of ours begins
        self.state, self.follow, self.beacon_epoch, self.welcomed = "ready", False, 0, set[Sock]()
        self.legs: dict[str, Leg] = {}  # by rid
        self.attaching: dict[str, tuple[bytes, int, int, float]] = {}  # readers that came before their leg
        self.pulling: dict[int, tuple[bytes, int, float]] = {}  # and decode ranks that did
        self.acks: dict[int, list[int]] = {}  # controller epoch -> [last number, dispatches, tokens]
        self.seqs = {"load": 0, "rooms": 0, "member": 0}
        self.load_seq = self.step = 0
        self.registering: list[list[Any]] = []
        self.dropping: list[list[Any]] = []
        self.progress: dict[Sock, tuple[list[Any], list[Any]]] = {}
        self.member_due = self.load_due = 0.0
        self.context = zmq.Context()
        bus, self.poller = options.bus, zmq.Poller()
        self.pub = self.socket(zmq.PUB, derive(bus, "pub", 0))
        self.sub = self.socket(zmq.SUB, derive(bus, "sub", 1))
        self.sub.setsockopt(zmq.SUBSCRIBE, b"beacon/")
        for kind in (b"to", b"member"):  # what the broker tells us, and our own words when they come back
            self.sub.setsockopt(zmq.SUBSCRIBE, b"%s/%s/%d/" % (kind, options.instance.encode(), options.dp_rank))
        self.on_the_bus = ""  # our state as the others hear it
        self.controllers = [self.socket(zmq.DEALER, derive(base, "nodes", 1)) for base in options.controller]
        self.heard = dict.fromkeys(self.controllers, now())
        self.data = self.context.socket(zmq.ROUTER)
        self.data.setsockopt(zmq.MAXMSGSIZE, 1 << 20)
        self.data.bind(options.data)
        self.endpoint = self.data.getsockopt_string(zmq.LAST_ENDPOINT)
        for socket in (self.sub, self.data, *self.controllers):
            self.poller.register(socket, zmq.POLLIN)

    def socket(self, kind: int, endpoint: str) -> Sock:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 500)
        socket.connect(endpoint)
        return socket

    # --- what it says ---------------------------------------------------------------------------------------------

    def hello(self, controller: Sock) -> None:
        o, running = self.o, [[leg.rid, leg.attempt] for leg in self.legs.values() if leg.alive]
        controller.send(encode("hello", *self.key, o.role, o.model, o.dp_size, self.state, self.endpoint,
                               CONTEXT, CAPACITY, SLOTS, BLOCK, running))  # fmt: skip

    def publish(self, tag: str, *rest: Any) -> None:
        """With a load report; `seq` rises by one for each message of a tag, `load.seq` for each report."""
        self.seqs[tag] += 1
        self.load_seq += 1
        alive = [leg for leg in self.legs.values() if leg.alive]
        kv = sum(len(leg.states) for leg in alive)
        todo = sum(len(leg.prompt) for leg in alive if not leg.states)
        running = min(SLOTS, len(alive))
        acks = [[epoch, *counts[1:]] for epoch, counts in self.acks.items()]
        load = [self.load_seq, self.step, running, len(alive) - running, todo, kv, CAPACITY, SLOTS, acks]
        topic = b"%s/%s/%d/" % (tag.encode(), self.o.instance.encode(), self.o.dp_rank)
        self.pub.send_multipart([topic, encode(tag, *self.key, self.seqs[tag], load, *rest)])
        self.load_due = now() + self.o.report_interval_s

    def publish_member(self) -> None:
        o = self.o
        self.publish("member", o.role, o.model, o.dp_size, self.state, self.endpoint, self.follow,
                     self.seqs["rooms"], o.report_interval_s)  # fmt: skip
        self.member_due = now() + o.report_interval_s

    def restate(self) -> None:
        self.publish_member()
        rooms = [[leg.room, leg.attempt] for leg in self.legs.values() if leg.alive and leg.room is not None]
        for at in range(0, max(1, len(rooms)), 4096):
            self.publish("rooms", self.endpoint, rooms[at : at + 4096], [], True)

    def flush(self) -> None:
        """After each turn, when everything that had arrived is ingested: what changed, and the load as it is now."""
        if self.registering or self.dropping:
            self.publish("rooms", self.endpoint, self.registering[:4096], self.dropping[:4096])
            del self.registering[:4096], self.dropping[:4096]
        if now() >= self.member_due:
            self.publish_member()
        elif now() >= self.load_due or self.progress:
            self.publish("load")
        for controller, (started, ended) in self.progress.items():
            controller.send(encode("progress", *self.key, started, ended))
        self.progress.clear()

    # --- what it hears --------------------------------------------------------------------------------------------

    def on_frames(self, socket: Sock, frames: list[bytes]) -> None:
        if socket is self.sub:
            self.on_bus(frames)
        elif socket is self.data:
            self.on_data(frames)
        else:
            self.on_controller(socket, frames)

    def on_bus(self, frames: list[bytes]) -> None:
        tag, *fields = decode(frames[-1])
        if tag == "beacon" and fields[0] != self.beacon_epoch:
            self.beacon_epoch = fields[0]
            self.restate()
        elif tag == "resync" and tuple(fields[:3]) == self.key:
            self.restate()
        elif tag == "member" and tuple(fields[:3]) == self.key:
            self.on_the_bus = fields[8]

    def on_controller(self, controller: Sock, frames: list[bytes]) -> None:
        self.heard[controller] = now()
        tag, *fields = decode(frames[0])
        if tag == "welcome":
            self.welcomed.add(controller)
            if self.follow != fields[2]:
                self.follow, self.member_due = fields[2], 0.0
        elif tag == "who":
            self.hello(controller)
        elif tag == "ping":
            controller.send(encode("pong", fields[0], self.step, False))
        elif tag == "dispatch":
            self.on_dispatch(controller, fields, frames[1:])
        elif tag == "cancel_leg":
            leg = self.legs.get(fields[0])
            if leg is not None and leg.alive and leg.attempt <= fields[1]:
                self.end(leg, padded(fields, 2, "cancelled")[2])
        elif tag == "drain":
            self.drain()

    def on_dispatch(self, controller: Sock, fields: list[Any], payload: list[bytes]) -> None:
        rid, attempt, role, _, epoch, number, charge, prompt_tokens, max_tokens, offset, room = padded(
            fields, 9, 0, None
        )
        counts = self.acks.setdefault(epoch, [0, 0, 0])
        if number <= counts[0]:
            return  # a repeat
        counts[:] = number, counts[1] + 1, counts[2] + charge  # acknowledged, whatever becomes of it
        before, code = self.legs.get(rid), ""
        if before is not None and before.attempt == attempt:  # its controller restarted: it hears how things stand
            before.controller = controller
            self.report(before, started=bool(before.ids), ended=not before.alive)
            return
        prompt = list(struct.unpack(f"<{prompt_tokens}i", payload[0])) if len(payload[0]) == 4 * prompt_tokens else []
        if before is not None and before.attempt > attempt:
            code = "fenced"
        elif self.state != "ready":
            code = "draining"
        elif role != self.o.role or not prompt or max_tokens < 1:
            code = "bad_request"
        elif prompt_tokens + max_tokens > CONTEXT:
            code = "too_long"
        if before is not None and before.alive and not code:
            self.end(before, "fenced")
        leg = Leg(controller, rid, attempt, room if role == "prefill" else None, prompt, max_tokens, offset)
        if code:
            leg.finish, leg.code = "failed", code
            self.report(leg, ended=True)
            return
        self.legs[rid] = leg
        if leg.room is not None:
            self.registering.append([room, attempt])
            leg.reader = self.pulling.pop(room, (None,))[0]
        if rid in self.attaching:
            self.on_attach(*self.attaching.pop(rid)[:3], rid)

    def report(self, leg: Leg, *, started: bool = False, ended: bool = False) -> None:
        starts, ends = self.progress.setdefault(leg.controller, ([], []))
        if started:
            starts.append([leg.rid, leg.attempt])
        if ended:
            ends.append([leg.rid, leg.attempt, self.o.role, leg.code, "", len(leg.ids)])

    def end(self, leg: Leg, code: str, finish: str = "failed") -> None:
        leg.code, leg.finish, leg.closed_at = code, "cancelled" if code == "cancelled" else finish, now()
        if leg.room is not None:
            self.dropping.append([leg.room, leg.attempt, code])
            if leg.reader is not None and code != "ok":
                self.data.send_multipart([leg.reader, encode("kv_fail", leg.room, leg.attempt, code)])
        self.report(leg, ended=True)

    def on_data(self, frames: list[bytes]) -> None:
        peer, (tag, *fields) = frames[0], decode(frames[-1])
        if tag == "attach":
            rid, attempt, have = padded(fields, 2, 0)
            self.on_attach(peer, attempt, have, rid)
        elif tag == "detach" and fields[0] in self.legs and not self.legs[fields[0]].alive:
            self.legs[fields[0]].sent = -1  # its reader has everything
        elif tag == "kv_pull":
            self.on_pull(peer, *fields[:5])
        elif tag == "kv_done":
            leg = self.in_room(fields[0])
            if leg is not None and leg.alive and leg.attempt == fields[1] and leg.reader == peer:
                code = padded(fields, 2, "ok")[2]
                self.end(leg, code if code in ("ok", "cancelled") else "decode_failed", "length")

    # --- tokens -----------------------------------------------------------------------------------------------------

    def on_attach(self, peer: bytes, attempt: int, have: int, rid: str) -> None:
        leg = self.legs.get(rid)
        if leg is None or leg.attempt < attempt:
            self.attaching[rid] = (peer, attempt, have, now())
        elif leg.attempt > attempt:
            self.data.send_multipart([peer, encode("tokens", rid, attempt, have, [], "failed", "fenced")])
        else:
            leg.reader, leg.sent = peer, max(have, leg.offset)
            self.send_tokens(leg)

    def send_tokens(self, leg: Leg) -> None:
        """What its reader lacks; the end goes with the last ids. Empty: a sign of life."""
        if leg.reader is None or leg.room is not None or leg.sent < 0:
            return
        ids = leg.ids[leg.sent - leg.offset :]
        message = encode("tokens", leg.rid, leg.attempt, leg.sent, ids, leg.finish, leg.code, "", "local")
        self.data.send_multipart([leg.reader, message])
        leg.sent += len(ids)

    # --- KV blocks --------------------------------------------------------------------------------------------------

    def in_room(self, room: int) -> Leg | None:
        """The live leg, else the last that ended; at most one lives."""
        legs = [leg for leg in self.legs.values() if leg.room == room]
        return max(legs, key=lambda leg: (leg.alive, leg.closed_at), default=None)

    def on_pull(self, peer: bytes, room: int, attempt: int, epoch: int, first: int, count: int) -> None:
        leg = self.in_room(room)
        if epoch != self.epoch:
            self.data.send_multipart([peer, encode("kv_fail", room, attempt, "peer_lost")])
            return
        if leg is None or leg.attempt < attempt:  # we shall be told to prefill it in a moment
            if len(self.pulling) < 4096:
                self.pulling[room] = (peer, attempt, self.pulling.get(room, (b"", 0, now()))[2])
            self.send_meta(Leg(self.controllers[0], "", leg.attempt if leg else attempt, room, [], 0, 0, reader=peer))
            return
        if not leg.alive:
            self.data.send_multipart([peer, encode("kv_fail", room, attempt, leg.code)])
            return
        if leg.attempt > attempt:  # a sign of life that names ours
            self.send_meta(Leg(self.controllers[0], "", leg.attempt, room, [], 0, 0, reader=peer))
            return
        leg.reader, leg.last_seen_at = peer, now()
        if first == 0:
            self.send_meta(leg)
        for index in range(first, min(first + count, -(-len(leg.states) // BLOCK))):
            states = leg.states[index * BLOCK : (index + 1) * BLOCK]
            block = struct.pack(f"<{len(states)}I", *states).ljust(4 * BLOCK, b"\0")
            check = crc32(block, crc32(struct.pack("<QII", room, attempt, index)))
            self.data.send_multipart([peer, encode("kv_block", room, attempt, index, len(states), check), block])

    def send_meta(self, leg: Leg) -> None:
        ready, layout = bool(leg.ids), f"sim/{self.o.model}/{BLOCK}x4"
        blocks, first_token = -(-len(leg.states) // BLOCK), leg.ids[0] if ready else 0
        assert leg.reader is not None
        self.data.send_multipart([leg.reader, encode("kv_meta", leg.room, leg.attempt, len(leg.states), first_token,
                                                     blocks, BLOCK, layout, ready)])  # fmt: skip

    # --- computing ----------------------------------------------------------------------------------------------------

    def compute(self) -> bool:
        """One step: a token for each of the first legs that want one. Whether there was any."""
        wanted = [leg for leg in self.legs.values() if leg.alive and (leg.room is None or not leg.ids)][:SLOTS]
        for leg in wanted:
            for token in leg.ids[-1:] or leg.prompt:
                leg.states.append(crc32(struct.pack("<i", token), leg.states[-1] if leg.states else 0))
            leg.ids.append(3 + leg.states[-1] % (VOCABULARY - 3))
            if len(leg.ids) == 1:
                leg.last_seen_at = now()
                self.report(leg, started=True)
                if leg.room is not None and leg.reader is not None:
                    self.send_meta(leg)
            if leg.room is None and len(leg.ids) == leg.max_tokens:
                self.end(leg, "ok", "length")
            self.send_tokens(leg)
        self.step += bool(wanted)
        return bool(wanted)

    def each_second(self) -> None:
        for leg in list(self.legs.values()):
            if leg.alive and leg.room is not None:
                if leg.ids and now() - leg.last_seen_at > (10 if leg.reader else 60):
                    self.end(leg, "decode_failed")  # nobody pulls, or who pulled has gone
            elif leg.alive:
                self.send_tokens(leg)
            elif leg.sent < 0 or now() - leg.closed_at > 30:
                del self.legs[leg.rid]
        for rid, (peer, attempt, have, since) in list(self.attaching.items()):
            if now() - since > 5:
                del self.attaching[rid]
                self.data.send_multipart([peer, encode("tokens", rid, attempt, have, [], "failed", "peer_lost")])
        for room, (peer, attempt, since) in list(self.pulling.items()):
            if now() - since > 10:
                del self.pulling[room]
                self.data.send_multipart([peer, encode("kv_fail", room, attempt, "unknown_room")])
        for controller, heard in self.heard.items():
            if now() - heard > 3:  # it restarted and does not know us, or it is away
                self.hello(controller)

    def drain(self) -> None:
        if self.state == "ready":
            self.state, self.member_due = "draining", 0.0
            for controller in self.controllers:
                self.hello(controller)

    def drained(self) -> bool:
        return self.state == "draining" and not any(
            leg.alive or (leg.reader and leg.sent >= 0 and now() - leg.closed_at < 5) for leg in self.legs.values()
        )

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.drain())
        announced, second = False, 0.0
        for controller in self.controllers:
            self.hello(controller)
        busy = False
        while not self.drained():
            ready = dict(self.poller.poll(0 if busy else 20))
            for socket in ready:
                for _ in range(256):
                    try:
                        frames = socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    try:
                        self.on_frames(socket, frames)
                    except (ValueError, TypeError, IndexError, struct.error) as error:
                        print(f"dropped a message that breaks the protocol: {error!r}", file=sys.stderr)
            busy = self.compute()
            self.flush()
            if now() >= second:
                second = now() + 1.0
                self.each_second()
            if not announced and self.on_the_bus and len(self.welcomed) == len(self.controllers):
                announced = True
                print(f"READY part={self.o.role} instance={self.o.instance} endpoint={self.endpoint}", flush=True)
        self.state = "gone"
        for controller in self.controllers:
            controller.send(encode("bye", *self.key))
        end, self.member_due = now() + 2, 0.0
        while self.on_the_bus != "gone" and now() < end:  # PUB loses what it says while the broker is away
            if now() >= self.member_due:
                self.publish_member()
            if self.sub.poll(50):
                self.on_bus(self.sub.recv_multipart())
        self.context.destroy(linger=500)


def derive(base: str, suffix: str, step: int) -> str:
    if base.startswith("ipc://"):
        return f"{base}.{suffix}"
    host, _, port = base.rpartition(":")
    return f"{host}:{int(port) + step}"


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a toy model, speaking the pdbus protocol.")
    parser.add_argument("--bus", required=True, help="ipc:///dir/bus or tcp://host:port")
    parser.add_argument("--controller", required=True, action="append", help="may be given several times")
    parser.add_argument("--instance", default="foreign-0")
    parser.add_argument("--role", choices=("unified", "prefill"), default="unified")
    parser.add_argument("--model", default="sim")
    parser.add_argument("--dp-rank", type=int, default=0)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--data", default="tcp://127.0.0.1:*", help="where to serve tokens and KV blocks")
    parser.add_argument("--report-interval-s", type=float, default=0.25)
    Rank(parser.parse_args()).run()


if __name__ == "__main__":
    main()
