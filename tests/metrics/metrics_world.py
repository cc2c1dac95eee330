"""A cluster with two controllers, an edge and keys, a Prometheus that scrapes it twice a second, and traffic that this
module makes and remembers: what the dashboard shows of it is held against that memory, never against metrics.

A machine may be busy. So the story goes on by events, never because some time should do: a chapter's quiet moments
are those at which Prometheus has a page of each part that was made later, by the stamp it bears. What took how long is
remembered with the rest, and so is which scrapes came through.

The story, told once by `World.run`; each chapter has a quiet moment before and after it:

- `steady`: pairs at both controllers and the edge, short ones to ranks 0 and long ones to ranks 1.
- `pause`: decode rank 1 is stopped for some seconds, with a request on its way to it, and goes on.
- `queue`: prefill rank 1 hangs in a step; prompts queue there and at both controllers, while three streams run.
- `restart`: prefill rank 1 is killed and started again, three times; the second time it held three KV caches.
- `knocks`: messages that nobody understands, and peers with a key that is not listed.
- `lost`: both decode ranks die with streams on them, requests find none, and the ranks come back.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
import zmq
from part_process import PartProcess

from bus.endpoints import BusAddress, ControllerAddress
from bus.runtime.keys import add_key, give_key, load_keys, new_keys
from bus.runtime.ports import free_ports
from bus.runtime.sockets import Sockets
from controller.observe import REGRET_MAX_PER_S
from nodes.own.engines.timing import SimTiming
from pdbus.client import Client
from pdbus.launcher import Cluster, ClusterSpec

EXAMPLES = Path(__file__).parents[2] / "examples" / "observability"
WAIT_S = 120.0  # of a busy machine; a wait that succeeds ends with its event
SCRAPE_S = 0.5
SETTLED_S = 0.2  # seconds for reports and rooms, which no event announces
PARTS = 8  # broker, two controllers, four nodes, the edge
HANG = 510  # a step that is fed this token never ends
DECODE_STEP_S = 0.025
PREFILL = SimTiming()
BLOCK = 16
KV_BYTES = 64  # of a token
DECODE_KV, DECODE_RUNNING, PREFILL_RUNNING = 16_384, 8, 4
LEASE_S, PAUSE_S, SLO_S = 6.0, 4.0, 1.0
SHORT, SHORT_SHARED, LONG, LONG_SHARED, OUTPUT = 128, 64, 2_000, 400, 4
QUEUED, OVER, HELD_BACK = 200, 5, 2  # tokens of a prompt that queues; how many wait at each controller
STREAMS, STREAM_TOKENS = 3, 5_000  # which takes them longer than anybody reads
AT_THE_RANK = 2 * PREFILL_RUNNING  # its credits: the overcommit's default is 2
ALONE = 6  # of them are prefill legs without a decode leg
DEADLINE_S = 1.5
CACHES, KNOCKS, NOISE, IN_VAIN = 3, 8, 20, 8


def prompt(number: int, length: int, shared: int) -> list[int]:
    """`length` token ids, of which the first `shared` are those of all prompts of that length."""
    first = [(11 * at + length) % 400 + 3 for at in range(shared)]
    return first + [(number * 31 + at * 7 + (at * number) % 13) % 400 + 3 for at in range(length - shared)]


@dataclass
class Sent:
    """One request, by its client's clock."""

    kind: str  # short, long, ...
    by: str  # controller-0, controller-1 or edge
    tokens: int = 0  # received
    began_s: float = field(default_factory=time.monotonic)
    ttft_s: float = 0.0
    total_s: float = 0.0  # to the last token
    code: str = ""  # empty: it goes on
    prefill: str = ""  # the ranks, as instance/dp_rank
    decode: str = ""


@dataclass
class Chapter:
    """`start` and `end` are quiet; seconds since 1970."""

    start: float
    end: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    at: dict[str, float] = field(default_factory=dict)  # further moments, by name
    facts: dict[str, float] = field(default_factory=dict)  # what was done or received at them
    scraped_s: float = 0.0  # from the first to the last scrape in it, at the part of which that is the least

    @property
    def long_s(self) -> float:
        return self.end - self.start


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def poll_for(what: Callable[[], Any], why: str, within_s: float = WAIT_S) -> Any:
    until = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < until, f"never: {why}"
        time.sleep(0.05)
    return found


class World:
    def __init__(self, place: Path, programs: Path) -> None:
        self.place, self.programs = place, programs
        self.chapters: dict[str, Chapter] = {}
        self._stack = ExitStack()
        self._now: Chapter
        self._scraped = 0.0

    # --- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> World:
        try:
            self._start()
            self.run()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        keys = self.place / "keys"
        new_keys(keys, ("prefill-0", "prefill-1", "decode-0", "decode-1"))
        add_key(keys, "controllers", "controller-1")
        new_keys(self.place / "stranger")
        self.keys, base = keys, f"ipc://{self.place}"
        self.bus = f"{base}/bus"
        self.controllers = [f"{base}/c{number}" for number in range(2)]
        ports = free_ports("127.0.0.1", 12)
        self.http, self.second, self.prometheus = ports, ports + 1, ports + 2
        slo = ("--queue-order", "slo", "--ttft-slo-s", str(SLO_S))
        usual = ("--lease-s", str(LEASE_S), "--hang-s", "60")
        line = ["-P", "-m", "controller", "--name", "controller-1", "--bus", self.bus, "--keys", str(keys)]
        line += ["--controller", self.controllers[1], "--metrics-port", str(self.second), "--log-level", "warning"]
        line += ["--expect", "prefill", "--expect", "decode", *usual, *slo]
        line += ["--prefill-method", "total_tokens", "--decode-method", "total_requests"]
        other = PartProcess([sys.executable, *line], self.place / "controller-1.log")
        self._stack.callback(other.close)
        spec = ClusterSpec(
            prefill=1, prefill_instances=2, decode=1, decode_instances=2, engine="sim", model="sim",
            prefill_method="total_tokens", decode_method="total_requests",
            bus=self.bus, controller=f"{self.controllers[0]}#controller-0",
            keys=str(keys), http=f"127.0.0.1:{self.http}", metrics_port=ports + 3, log_level="warning",
            controller_args=usual,
            node_args=("--controller", f"{self.controllers[1]}#controller-1",
                       "--sim-kv-bytes-per-token", str(KV_BYTES), "--sim-vocab-size", "512"),
            prefill_args=("--max-running", str(PREFILL_RUNNING), "--fault-hang-token", str(HANG)),
            decode_args=("--max-running", str(DECODE_RUNNING), "--kv-tokens", str(DECODE_KV),
                         "--sim-base-s", str(DECODE_STEP_S), "--sim-decode-s", "0", "--sim-context-s-per-token", "0"),
        )  # fmt: skip
        self.cluster = self._stack.enter_context(Cluster(spec))
        self._stack.enter_context(_running(self._prometheus_command(), self.place / "prometheus.log"))
        give_key(keys, "clients", "edge", self.place / "edge")  # clients of several keys would take turns in a step
        self.clients, self.desks = (
            [
                self._stack.enter_context(Client(f"{address}#controller-{number}", keys=of, retries=0))
                for number, address in enumerate(self.controllers)
            ]
            for of in (self.place / "edge", keys)
        )
        self._readers = self._stack.enter_context(ThreadPoolExecutor(64))
        poll_for(lambda: self._answers() == PARTS, "Prometheus scrapes all parts")
        self._all_ready()

    def _prometheus_command(self) -> list[str]:
        """As examples/observability/prometheus.yml says, but for addresses and intervals."""
        config = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {
            "scrape_interval": f"{SCRAPE_S * 1000:g}ms", "scrape_timeout": f"{SCRAPE_S * 1000:g}ms",
            "evaluation_interval": "1s",
        }  # fmt: skip
        (job,) = config["scrape_configs"]
        first = self.cluster.children["controller-0"].spec.metrics_port
        (finds,) = job["http_sd_configs"]
        job["http_sd_configs"] = [
            finds | {"url": f"http://127.0.0.1:{port}/targets", "refresh_interval": "1s"}
            for port in (first, self.second)
        ]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{self.http}"]}]
        path = self.place / "prometheus"
        path.mkdir()
        (path / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        shutil.copy(EXAMPLES / "alerts.yml", path)
        return [
            str(self.programs / "prometheus"), f"--config.file={path}/prometheus.yml",
            f"--storage.tsdb.path={path}/data", f"--web.listen-address=127.0.0.1:{self.prometheus}",
        ]  # fmt: skip

    # --- Prometheus ---------------------------------------------------------------------------------------------

    def _get(self, what: str, **asked: str) -> Any:
        url = f"http://127.0.0.1:{self.prometheus}/api/v1/{what}?{urllib.parse.urlencode(asked)}"
        answer = json.loads(fetched(url))
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def ask(self, query: str, at: float) -> list[Any]:
        """What a query has at that moment: a list of `metric` and `value`."""
        return list(self._get("query", query=query, time=f"{at:.3f}"))

    def recorded(self, selector: str, start: float, end: float) -> list[Any]:
        """Series of plain metrics each SCRAPE_S from start to end: a list of `metric` and `values`."""
        return list(
            self._get("query_range", query=selector, start=f"{start:.3f}", end=f"{end:.3f}", step=str(SCRAPE_S))
        )

    def pages(self) -> list[str]:
        """Where each part has its figures."""
        found = json.loads(fetched(f"http://127.0.0.1:{self.second}/targets"))
        return [f"http://{target}/metrics" for each in found for target in each["targets"]] + [
            f"http://127.0.0.1:{self.http}/metrics"
        ]

    def _answers(self) -> int:
        try:
            return len(self.ask("up == 1", time.time()))
        except OSError:
            return 0

    def seen(self, parts: int = PARTS) -> float:
        """Wait until Prometheus has a page of each of so many parts that was made after this call, and controllers know
        of each request that has ended; that moment. An edge makes its page when it is asked.

        All pages are of one interval, and the moment is the last one's: no scrape that is still under way, and may
        fail, is of a moment before it.
        """
        after = time.time() + SETTLED_S
        live = sum(not each.code for chapter in self.chapters.values() for each in chapter.sent)
        scraped = "(timestamp(up) and up == 1)"
        query = (
            f"min({scraped}) and max({scraped}) - min({scraped}) < {SCRAPE_S}"
            f" and count({scraped} > {after:.3f}) == {parts}"
            f" and count(pdbus_page_timestamp_seconds > {after:.3f}) == {parts - 1}"
            f" and sum(pdbus_controller_requests) == {live}"
        )

        def look() -> tuple[float, float] | None:
            (last,) = self.ask(f"max({scraped})", time.time())
            at = float(last["value"][1])
            found = self.ask(query, at)
            return (at, float(found[0]["value"][1])) if found else None

        at, first = poll_for(look, f"pages of {parts} parts, and {live} requests")
        self._scraped = (first + at - SCRAPE_S) / 2  # after the scrapes before these, which show older pages
        return float(at)

    def begun(self) -> float:
        """The same; the moment from which on each part has a scrape before anything more happens."""
        self.seen()
        return self._scraped

    def _scraped_s(self, start: float, end: float) -> float:
        spans = []
        for each in self.ask(f"up[{(end - start) * 1000:.0f}ms]", end):
            good = [at for at, value in each["values"] if value == "1"]
            spans.append(good[-1] - good[0])
        return min(spans)

    # --- traffic ------------------------------------------------------------------------------------------------

    def send(self, kind: str, by: int, ids: list[int], rank: int, **options: Any) -> Future[Sent]:
        """To a controller, with the instances of both roles named; its output is read on a thread."""
        sent = Sent(kind, f"controller-{by}", prefill=f"prefill-{rank}/0", decode=f"decode-{rank}/0")
        self._now.sent.append(sent)
        where = {"leg": "pair", "prefill_instance": f"prefill-{rank}", "instance": f"decode-{rank}"}
        if options.get("leg") == "prefill":
            where = {"instance": f"prefill-{rank}"}
        options = {"max_tokens": OUTPUT, "ignore_eos": True} | where | options
        stream = self.clients[by].generate_tokens(ids, **options)

        def read() -> Sent:
            times = []
            try:
                for piece in stream:
                    times += [time.monotonic()] * len(piece.ids)
                    sent.tokens = len(times)
            except Exception as error:
                sent.code = getattr(error, "code", "") or type(error).__name__
            else:
                sent.code = stream.result.code
            if times:
                sent.ttft_s, sent.total_s = times[0] - sent.began_s, times[-1] - sent.began_s
            return sent

        future = self._readers.submit(read)
        future.stream = stream  # type: ignore[attr-defined]
        return future

    def post(self, kind: str, ids: list[int]) -> Future[Sent]:
        """Over HTTP, streamed; the cluster picks the ranks, and the answer names them."""
        sent = Sent(kind, "edge")
        self._now.sent.append(sent)
        body = {
            "input_ids": ids, "stream": True,
            "sampling_params": {"max_new_tokens": OUTPUT, "ignore_eos": True},
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )

        def read() -> Sent:
            times = []
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                for line in answer:
                    if line.startswith(b"data:") and b"[DONE]" not in line:
                        times.append(time.monotonic())
                        route = json.loads(line.removeprefix(b"data:"))["meta_info"]["pdbus"]
                sent.code = "ok" if answer.status == 200 else str(answer.status)
            sent.tokens = OUTPUT
            sent.ttft_s, sent.total_s = times[0] - sent.began_s, times[-1] - sent.began_s
            sent.prefill, sent.decode = route["prefill"], route["decode"]
            return sent

        return self._readers.submit(read)

    # --- the story ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        self._now = Chapter(0.0)
        for number, rank in enumerate((0, 1, 0, 1)):  # the shared beginnings get into all caches
            for ids in (prompt(number, SHORT, SHORT_SHARED), prompt(number, LONG, LONG_SHARED)):
                assert self.send("warm", 0, ids, rank).result(WAIT_S).code == "ok"
        for name in ("steady", "pause", "queue", "restart", "knocks", "lost"):
            self._now = self.chapters[name] = Chapter(self.begun())
            began = time.monotonic()
            getattr(self, f"_{name}")(self._now)
            self._now.end = self.seen()
            self._now.scraped_s = self._scraped_s(self._now.start, self._now.end)
            print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)

    def _steady(self, now: Chapter, seconds: int = 12) -> None:
        futures, began = [], time.monotonic()
        for slot in range(8 * seconds):
            _until(began + slot / 8)
            ids = prompt(100 + slot, SHORT, SHORT_SHARED)
            if slot % 8 == 7:
                futures.append(self.post("short", ids))
            else:
                futures.append(self.send("short", int(slot % 4 == 1), ids, 0))
            if slot % 4 == 0:
                _until(began + slot / 8 + 1 / 16)
                futures.append(self.send("long", slot // 4 % 2, prompt(100 + slot, LONG, LONG_SHARED), 1))
        for future in futures:
            future.result(WAIT_S)

    def _pause(self, now: Chapter) -> None:
        part = "decode-1/0"
        self.cluster.kill(part, signal.SIGSTOP)
        now.at["stopped"] = time.time()
        future = self.send("paused", 0, prompt(7, SHORT, SHORT_SHARED), 1)
        _until(time.monotonic() + PAUSE_S)
        now.at["going on"] = time.time()
        (page,) = self.ask('max(pdbus_page_timestamp_seconds{part="controller"})', now.at["going on"])
        self.cluster.kill(part, signal.SIGCONT)
        assert future.result(WAIT_S).code == "ok"
        now.facts["stopped_s"] = now.at["going on"] - now.at["stopped"]
        now.facts["shown_s"] = float(page["value"][1]) - now.at["stopped"]

    def _queue(self, now: Chapter) -> None:
        streams = [
            self.send("stream", 0, prompt(number, SHORT, SHORT_SHARED), 0, max_tokens=STREAM_TOKENS)
            for number in range(STREAMS)
        ]
        poll_for(lambda: all(each.tokens for each in now.sent), "all streams run")
        now.start = self.begun()  # what was dispatched before has no part in it
        queued = []
        for number in range(AT_THE_RANK):
            ids = prompt(number, QUEUED, 0)
            if number == 0:
                ids[-1] = HANG
            alone = {"leg": "prefill", "bootstrap_room": 3_000 + number} if number < ALONE else {}
            queued.append(self.send("queued", 0, ids, 1, **alone))
            self._taken_in(number + 1)  # so that each report acknowledges one
        waiting = [self.send("queued", 0, prompt(500 + number, QUEUED, 0), 1) for number in range(OVER)]
        waiting += [self.send("queued", 1, prompt(700 + number, QUEUED, 0), 1) for number in range(HELD_BACK)]
        now.facts["streamed before"] = sum(each.tokens for each in now.sent if each.kind == "stream")
        now.at["queued"] = self.seen()
        now.facts["streaming_s"] = time.monotonic() - min(each.began_s for each in now.sent)
        late = [
            self.send("late", 1, prompt(900 + number, QUEUED, 0), 1, deadline_s=DEADLINE_S)
            for number in range(HELD_BACK)
        ]
        assert [future.result(WAIT_S).code for future in late] == ["deadline"] * HELD_BACK
        for future in (*waiting, *queued, *streams):
            future.stream.cancel()  # type: ignore[attr-defined]
        for future in (*waiting, *queued, *streams):
            future.result(WAIT_S)

    def _taken_in(self, count: int) -> None:
        """Until prefill rank 1 has said that it took in `count` legs, and decode rank 1 that it has those of pairs."""
        wanted = {"prefill-1": count, "decode-1": max(0, count - ALONE)}

        def taken_in() -> bool:
            ranks = [each for each in self.desks[0].status().ranks if each.instance in wanted]
            return all((rank.outstanding, rank.in_flight_requests) == (wanted[rank.instance], 0) for rank in ranks)

        poll_for(taken_in, "a leg is acknowledged")
        time.sleep(1 / REGRET_MAX_PER_S)  # the next one is looked at again

    def _restart(self, now: Chapter) -> None:
        for start in range(3):
            if start == 1:
                poll_for(lambda: self._alive_rooms() == 0, "no room is left of the rank that hung")
                held = [
                    self.send(
                        "held", 0, prompt(50 + number, QUEUED, 0), 1, leg="prefill", bootstrap_room=4_000 + number
                    )
                    for number in range(CACHES)
                ]
                poll_for(lambda: self._alive_rooms() == CACHES, "the rooms are registered")
            self.cluster.restart("prefill-1/0")
            self._all_ready()
            now.at[f"start {start}"] = self.seen()
        for future in held:
            future.result(WAIT_S)

    def _alive_rooms(self) -> float:
        (found,) = self.ask("pdbus_broker_rooms_alive", time.time())
        return float(found["value"][1])

    def _all_ready(self) -> None:
        for desk in self.desks:
            poll_for(
                lambda desk=desk: sum(rank.state == "ready" for rank in desk.status().ranks) == 4,
                "both controllers have all ranks",
            )

    def _knocks(self, now: Chapter) -> None:
        """Noise of somebody with a key that is listed, and handshakes of one whose key is not."""
        bus, controller = BusAddress(self.bus), ControllerAddress(self.controllers[0])
        (rank,) = [each for each in self.desks[0].status().ranks if (each.role, each.dp_rank) == ("decode", 0)][:1]
        began = time.monotonic()
        with Sockets(keys=load_keys(self.keys, "admins")) as own:
            doors = [
                (own.dealer(f"{controller.clients}#controller-0", role="controllers"), (b"noise",)),
                (own.dealer(bus.bootstrap), (b"", b"noise")),
                (own.dealer(rank.endpoint, role="nodes"), (b"noise",)),
            ]
            for number in range(NOISE):
                _until(began + number / 5)
                for door, frames in doors:
                    door.send_multipart(frames)
                if number < KNOCKS:
                    self._knock(controller.clients, (self.keys / "allow/controllers/controller-0.key").read_bytes())
                    self._knock(bus.bootstrap, (self.keys / "allow/brokers/broker.key").read_bytes())
            self.seen()

    def _knock(self, endpoint: str, server: bytes) -> None:
        """One handshake with a key of its own, to its refusal."""
        public, secret = zmq.curve_keypair()
        with zmq.Context() as context, context.socket(zmq.DEALER) as door:
            door.setsockopt(zmq.LINGER, 0)
            door.setsockopt(zmq.RECONNECT_IVL, -1)
            door.curve_publickey, door.curve_secretkey, door.curve_serverkey = public, secret, server.strip()
            monitor = door.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            door.connect(endpoint)
            assert monitor.poll(WAIT_S * 1000), "refused"
            door.disable_monitor()
            monitor.close()

    def _lost(self, now: Chapter) -> None:
        streams = [
            self.send("dying", number % 2, prompt(number, SHORT, SHORT_SHARED), number % 2, max_tokens=STREAM_TOKENS)
            for number in range(4)
        ]
        poll_for(lambda: all(each.tokens for each in now.sent), "all streams run")
        for rank in range(2):
            self.cluster.kill(f"decode-{rank}/0")
        now.at["killed"] = time.time()
        assert [future.result(WAIT_S).code for future in streams] == ["peer_lost"] * 4
        now.at["missed"] = self.seen(PARTS - 2)
        for number in range(IN_VAIN):
            began, ids = time.monotonic(), prompt(number, SHORT, SHORT_SHARED)
            assert self.send("in vain", number % 2, ids, 0).result(WAIT_S).code == "no_rank"
            _until(began + 0.5)
        now.at["refused"] = self.seen(PARTS - 2)
        for rank in range(2):
            self.cluster.begin(f"decode-{rank}/0")
        self._all_ready()


def _until(moment: float) -> None:
    """Traffic has a rhythm: the one thing here that goes by the clock."""
    time.sleep(max(0.0, moment - time.monotonic()))


class _running:
    """A process, ended at the end."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command, self._log = command, log

    def __enter__(self) -> subprocess.Popen[bytes]:
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
