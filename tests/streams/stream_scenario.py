"""One cluster in which each stream of the bus has something to carry.

stream_scenario.py ENGINE START_S WAIT_S [MODEL]

Runs with the folder `plugin` on its PYTHONPATH and STREAMS_TAP set, as all that it starts does. A step that fails says
so on stderr and in the tap, and the next one follows: where a stream is dropped, what others carry is still seen.
"""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import sitecustomize

from bus.endpoints import BusAddress, ControllerAddress
from bus.errors import PeerLost
from bus.rights import KeyRole
from bus.runtime.epochs import new_epoch
from bus.runtime.keys import new_keys, revoke_key
from bus.runtime.sockets import Sockets
from bus.wire import codec, topics
from bus.wire.messages import KvPull, Member, Pong, RankStatus, Registration, Rooms
from pdbus.client import Client
from pdbus.fleet.source import BrokerStatusClient
from pdbus.launcher import Cluster, ClusterSpec
from pdbus.timeline.live import AskingClient

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADER = f"00-{TRACE}-00f067aa0ba902b7-01"
GHOST = "tcp://127.0.0.1:1"
SHARED = 77  # the room that two publishers claim
NOWHERE = 78  # the room that nobody registers
REST_S = 1.3
UNTIL_CUT_S = 4.0  # lists are looked at each second, and what is missing has to be so twice
HEARD_S = 2.5  # in which whoever is not cut off is heard at least twice
STRAY = 99_001  # the number of a pong without a hello
SEPARATE = (79, 80, 81)  # rooms of two legs each that are asked for one by one
ENGINES: dict[str, dict[str, Any]] = {
    "sim": {
        "engine": "sim",
        "model": "sim",
        "node_args": ("--sim-base-s", "0.002", "--sim-prefill-s-per-token", "0.0005"),
    },
    "sim-keys": {"engine": "sim", "model": "sim", "decode_instances": 2},
    "numpy": {"engine": "numpy", "model": "tiny"},
    "torch": {"engine": "torch", "model": "tiny"},
    "smollm2": {"engine": "torch", "model": "smollm2"},
    "vllm": {
        "engine": "vllm",
        "controller_args": ("--hang-s", "60"),
        "engine_args": (
            "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--num-gpu-blocks-override", "256",
            "--skip-tokenizer-init",
        ),
        "stop_grace_s": 60.0,
    },
}  # fmt: skip
VLLM_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",  # starts sooner: no worker of its own, as on one GPU
}  # fmt: skip
VOCABULARY = 200  # every engine's is larger


class Collector:
    """Where spans are exported to: what it gets is recorded."""

    def __enter__(self) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sitecustomize.record(("spans", self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class Scenario:
    """Its steps, in order."""

    def __init__(self, cluster: Cluster, client: Client, sockets: Sockets, engine: str, wait_s: float) -> None:
        self.cluster = cluster
        self.client = client
        self.sockets = sockets
        self.wait_s = wait_s
        rng = random.Random(7)
        self.prompt = [rng.randrange(3, VOCABULARY) for _ in range(150)]
        bus = BusAddress(cluster.bus)
        self.pub = sockets.pub(bus.publish)
        self.sub = sockets.sub(bus.subscribe, (topics.TO, topics.BEACON))

    def steps(self) -> list[Callable[[], None]]:
        if self.cluster.spec.keys:
            return [self.a_request, self.a_revoked_node, self.a_revoked_controller]
        again = [self.the_prompt_again] if self.cluster.spec.engine == "vllm" else []
        return [
            self.a_request, *again, self.two_legs, self.a_cancel, self.a_room_that_nobody_registers,
            self.a_request_in_vain, self.a_trace, self.a_recording, self.questions, self.strays, self.rooms_of_two,
            self.rest, self.drains,
        ]  # fmt: skip

    def until(self, true: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + self.wait_s
        while not true():
            if time.monotonic() > end:
                raise TimeoutError(what)
            time.sleep(0.01)

    def result(self, stream: Any) -> Any:
        """TimeoutError for one that does not end, which is cancelled."""
        results: list[Any] = []
        reader = Thread(target=lambda: results.append(stream.result), daemon=True)
        reader.start()
        reader.join(self.wait_s)
        if not results:
            stream.cancel()
            raise TimeoutError("a request does not end")
        return results[0]

    def receive(self, socket: Any, what: str) -> None:
        """The next message of a socket of this scenario's own, which no loop of ours reads."""
        if not socket.poll(int(1000 * self.wait_s)):
            raise TimeoutError(what)
        sitecustomize.record([b"", *socket.recv_multipart()])

    def told(self, what: str, **facts: Any) -> None:
        """What the tests compare with."""
        sitecustomize.record(("fact", what, facts))

    # --- requests -----------------------------------------------------------------------------------------------------

    def a_request(self) -> None:
        self.told("request", rid="first", prompt=self.prompt)
        stream = self.client.generate_tokens(
            self.prompt, max_tokens=4, rid="first", ignore_eos=True, leg="pair", traceparent=HEADER
        )
        result = self.result(stream)
        self.told("result", rid="first", ids=list(result.ids), code=result.code)

    def the_prompt_again(self) -> None:
        """To its end: prefill says how much of it vLLM had cached."""
        self.result(self.client.generate_tokens(self.prompt, max_tokens=1, rid="again", ignore_eos=True, leg="pair"))

    def two_legs(self) -> None:
        """Each for itself, so that decode has to ask where the room is, and prefill has a load to tell meanwhile."""
        ask = self.client.generate_tokens
        for room in SEPARATE:
            prompt = [room, *self.prompt[1:]]  # not in the cache
            prefill = ask(prompt, leg="prefill", bootstrap_room=room, rid=f"prefill-{room}", max_tokens=2)
            self.until(lambda: self.holds("prefill"), "a KV cache is held")
            decode = ask(prompt, leg="decode", bootstrap_room=room, rid=f"decode-{room}", max_tokens=2)
            self.result(prefill)
            self.result(decode)

    def holds(self, role: str) -> bool:
        return any(rank.role == role and rank.load and rank.load.kv_tokens for rank in self.ranks())

    def ranks(self) -> Sequence[RankStatus]:
        return self.client.status(timeout_s=self.wait_s).ranks

    def a_cancel(self) -> None:
        stream = self.client.generate_tokens(self.prompt, max_tokens=800, rid="cancelled", ignore_eos=True, leg="pair")
        self.until(lambda: self.running("decode"), "it runs")
        stream.cancel()
        self.until(lambda: not self.running("decode"), "it is gone")

    def running(self, role: str) -> bool:
        return any(rank.role == role and rank.load and rank.load.running for rank in self.ranks())

    def a_room_that_nobody_registers(self) -> None:
        stream = self.client.generate_tokens(
            self.prompt, leg="decode", bootstrap_room=NOWHERE, rid="nowhere", max_tokens=2
        )
        self.until(lambda: any(rank.outstanding for rank in self.ranks()), "it was dispatched")
        time.sleep(0.3)  # for the rank's question to be asked; nothing is told of it
        stream.cancel()

    def a_request_in_vain(self) -> None:
        self.result(self.client.generate_tokens([5, 6, 7], routed_dp_rank=999, rid="vain"))

    # --- questions ----------------------------------------------------------------------------------------------------

    def a_trace(self) -> None:
        with suppress(PeerLost):
            self.client.trace("first", timeout_s=self.wait_s)

    def a_recording(self) -> None:
        keys = [(rank.instance, rank.dp_rank) for rank in self.ranks()]
        with AskingClient(self.cluster.controller) as client:
            assert isinstance(client, AskingClient)
            wait([client.ask_record(key, 9.0, 0, 0) for key in keys])
            self.result(self.client.generate_tokens(self.prompt[::-1], max_tokens=3, rid="recorded", leg="pair"))
            wait([client.ask_record(key, 0.0, 0, 0) for key in keys])

    def questions(self) -> None:
        self.client.status(timeout_s=self.wait_s)
        with BrokerStatusClient(BusAddress(self.cluster.bus)) as desk:
            if (counts := desk.ask(int(1000 * self.wait_s))) is not None:
                sitecustomize.record([b"", codec.encode(counts)])

    # --- what is not as it should be ----------------------------------------------------------------------------------

    def strays(self) -> None:
        """Of each socket one message that it answers with a refusal of its kind."""
        at = ControllerAddress(self.cluster.controller)
        node = self.cluster.children["prefill-0/0"]
        sends: list[tuple[str, list[bytes], str]] = [
            (at.nodes, [codec.encode(Pong(STRAY, 0, False, 0))], "who"),
            (at.nodes, [b"\1garbage"], "refused to a node"),
            (at.clients, [b"\1garbage"], "refused to a client"),
            (BusAddress(self.cluster.bus).bootstrap, [b"", b"\1garbage"], "refused by the broker"),
            (node.facts["endpoint"], [codec.encode(KvPull(5, 1, 12345, 0, 0))], "kv_fail"),
        ]
        opened = [(self.sockets.dealer(endpoint), frames, what) for endpoint, frames, what in sends]
        for socket, frames, _ in opened:
            socket.send_multipart(frames)
        missing = []
        for socket, _, what in opened:
            try:
                if not socket.poll(int(1000 * min(2.0, self.wait_s))):
                    raise TimeoutError(what)
                sitecustomize.record([what.encode(), *socket.recv_multipart()])
            except TimeoutError as error:
                missing.append(str(error))
        if missing:
            raise TimeoutError(f"no answer: {missing}")

    def rooms_of_two(self) -> None:
        """Two ranks that claim a room; one that says more rooms than the broker has heard of."""
        self.receive(self.sub, "a beacon")
        for name, rooms in (("ghost-0", 1), ("ghost-1", 1), ("ghost-2", 0)):
            epoch = new_epoch()
            known = 0 if rooms else 7
            member = Member(name, 0, epoch, 1, None, "prefill", "ghost", 1, "ready", GHOST, False, known, 5.0)
            said: list[Any] = [member]
            if rooms:
                said.append(Rooms(name, 0, epoch, 1, None, GHOST, (Registration(SHARED),)))
            for message in said:
                self.pub.send_multipart([topics.of(message), codec.encode(message)])
        end = time.monotonic() + min(2.0, self.wait_s)
        seen: set[bytes] = set()
        while len(seen) < 3 and time.monotonic() < end:
            if self.sub.poll(50):
                frames = self.sub.recv_multipart()
                sitecustomize.record(frames)
                seen |= {frames[0]} - {topics.BEACON}
        if len(seen) < 3:
            raise TimeoutError(f"the broker said only {seen}")

    # --- keys ---------------------------------------------------------------------------------------------------------

    def a_revoked_node(self) -> None:
        self.revoke("nodes", "decode-1")

    def a_revoked_controller(self) -> None:
        self.revoke("controllers", "controller-0")

    def revoke(self, role: KeyRole, name: str) -> None:
        revoke_key(Path(self.cluster.spec.keys), role, name)
        time.sleep(UNTIL_CUT_S)
        self.told(f"revoked {name}", at=time.time())
        time.sleep(HEARD_S)

    def rest(self) -> None:
        """For what is said each second, whether or not anything happens."""
        time.sleep(REST_S)

    # --- the end ------------------------------------------------------------------------------------------------------

    def drains(self) -> None:
        self.client.drain("decode-0", 0, timeout_s=self.wait_s)
        self.client.drain_role("prefill", timeout_s=self.wait_s)
        nodes = [child for name, child in self.cluster.children.items() if "/" in name]
        self.until(lambda: all(node.returncode is not None for node in nodes), "the nodes have left")


def main(engine: str, start_s: float, wait_s: float, model: str) -> None:
    logs = Path(os.environ["STREAMS_TAP"]) / "logs"
    with Collector() as url, ExitStack() as stack:
        chosen = {"stop_grace_s": 3.0, **ENGINES[engine]}
        if model:
            chosen["model"] = model
        if engine == "sim-keys":
            chosen["keys"] = str(Path(os.environ["STREAMS_TAP"]) / "keys")
            new_keys(Path(chosen["keys"]), ("prefill-0", "decode-0", "decode-1"))
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        env |= VLLM_ENV if engine == "vllm" else {}
        spec = ClusterSpec(
            prefill=1,
            decode=1,
            prefill_method="cache_aware",
            env=env,
            log_dir=str(logs),
            start_timeout_s=start_s,
            **chosen,
        )
        cluster = stack.enter_context(Cluster(spec))
        for name, child in cluster.children.items():
            sitecustomize.record(("part", child.pid, name))
        client = stack.enter_context(cluster.client(retries=1, connect_timeout_s=wait_s))
        sockets = stack.enter_context(Sockets())
        for step in Scenario(cluster, client, sockets, engine, wait_s).steps():
            began = time.monotonic()
            try:
                step()
            except Exception as error:
                traceback.print_exc()
                sitecustomize.record(("failed", step.__name__, f"{type(error).__name__}: {error}"))
            print(f"{step.__name__} took {time.monotonic() - began:.2f} s", file=sys.stderr)
    sitecustomize.record(("over",))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "")
