"""A fleet that never ran, busy for minutes, in one of some situations; and its page server, as a process:
python tests/support/fleet_world.py SITUATION RANKS [PORT]."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from msgspec.structs import replace
from status_world import rank

from bus.histogram import Histogram, trimmed
from bus.wire.messages import (
    BrokerStatus,
    ControllerEvent,
    ListedRequest,
    PartTrace,
    QueuedKind,
    QueueStatus,
    RankStatus,
    RequestLists,
    Role,
    Status,
    TraceEvent,
    TraceReply,
)
from pdbus.edge.fleet_server import serve
from pdbus.fleet.feed import Feed
from pdbus.fleet.figures import Sample
from pdbus.fleet.frames import Frames

SITUATIONS = ("well", "busy", "slow", "full", "queue", "dead", "empty", "old", "hidden", "hostile")
HOSTILE = "<img/src=x/onerror=alert(1)>"
SINCE_S = 60.0  # for so long it has been so
BEFORE_S = 300
SLOTS = 64
KV = 120_000


class ScriptedSource:
    """Half of the ranks are prefill, half decode, eight to an instance and host from 100 on. The last decode rank is
    slow or full, the first prefill rank dead."""

    def __init__(self, situation: str, ranks: int) -> None:
        assert situation in SITUATIONS
        self.situation = situation
        self.ranks = 0 if situation == "empty" else ranks
        self._began = time.monotonic()
        self._rng = random.Random(7)
        self._wander = [self._rng.uniform(0.8, 1.2) for _ in range(ranks)]
        self._ended = [0] * ranks
        self._ttft, self._tpot = ([Histogram() for _ in range(ranks)] for _ in range(2))

    def ask(self) -> Sample:
        """Return the next sample, as `StatusSource.ask` does."""
        return self.at(time.monotonic() - self._began)

    def at(self, now: float) -> Sample:
        """The fleet at `now` seconds after it was well for five minutes."""
        odd = self.situation if now > -SINCE_S else "well"
        ranks = tuple(self._rank(number, now, odd) for number in range(self.ranks))
        queue = QueueStatus(0, 0.0)
        if odd == "queue":
            kinds = (QueuedKind("llama-8b", ("decode",), 210), QueuedKind("llama-8b", ("prefill", "decode"), 31))
            keys = (("clients/batch", 198), ("clients/chat", 43))
            queue = QueueStatus(241, 8.0 + now % 3, kinds, ((5, 43), (0, 198)), keys)
        waiting = queue.requests
        elapsed = now + BEFORE_S
        counts = {
            "done": int(9 * self.ranks * elapsed),
            "requests": 20 * self.ranks + waiting,
            "queue_requests": waiting,
        }
        if odd == "dead":
            counts |= {"failed": 3, "failed_peer_lost": 3}
        if self.situation != "old":
            counts |= {"ttft_slo": 1, "ttft_slo_kept": int(8 * elapsed), "ttft_slo_missed": int(elapsed / 30)}
        old, hidden = self.situation == "old", self.situation == "hidden"
        status = Status(
            1, "controller-0", 7, elapsed, {"prefill": "cache_aware", "decode": "total_requests"}, counts, ranks,
            events=None if old or hidden else self._events(odd, now), queue=None if old or hidden else queue,
            requests=None if old or hidden else self._requests(now, waiting),
        )  # fmt: skip
        at = self._began + now
        return Sample(at, time.time() + at - time.monotonic(), status, BrokerStatus(1, 2, elapsed, {"rooms_alive": 9}))

    def trace(self, rid: str) -> TraceReply:
        """What became of a request whose rid begins with `req-`, in two attempts; others are unknown."""
        reply = TraceReply(1, "controller-0", (), kept=30_000, kept_s=612.0)
        if not rid.startswith(("req-", "<")):
            return reply
        whole, others = rid, ()
        if rid == "req-":
            whole, *rest = [f"req-{number:08x}" for number in range(4)]
            others = tuple(rest)
        return replace(reply, parts=story(self.situation, HOSTILE), rid=whole, others=others)

    def _requests(self, now: float, waiting: int) -> RequestLists:
        if not self.ranks:
            return RequestLists()
        name = HOSTILE if self.situation == "hostile" else "req"

        def listed(number: int, ago_s: float, first_s: float, waits: bool = False) -> ListedRequest:
            came_us = round((time.time() - now % 1 - ago_s) * 1e6)
            ranks = () if waits else (f"prefill-{number % 2}/0", f"decode-{number % 3}/0")
            late = first_s > 0.5 or waits
            return ListedRequest(
                f"{name}-{number:08x}", came_us, first_s, "llama-8b", 512 + 37 * number, 1, ranks, late
            )

        return RequestLists(
            tuple(listed(number, 61.0 - 3 * number, 0.1 + 0.02 * number) for number in range(20)),
            tuple(listed(100 + number, 8.0 - number / 3, 0.0, True) for number in range(min(20, waiting))),
            tuple(listed(200 + number, 30.0 * number, 2.0 / (number + 1)) for number in range(20)),
        )

    def _events(self, odd: str, now: float) -> tuple[ControllerEvent, ...]:
        start = round((time.time() - now - SINCE_S) * 1e6)
        found = [ControllerEvent(1, start - 200_000_000, "started", phrase="controller-0, epoch 7")]
        if odd == "dead":
            why = "its connection closed, and its lease of 4 s has ended; 3 requests ran there"
            found.append(ControllerEvent(2, start, "lost", "prefill-0", 0, "peer_lost", why, bad=True))
            found.append(ControllerEvent(3, start, "failed", "", 0, "peer_lost", "3 requests", bad=True))
        return tuple(found)

    def _rank(self, number: int, now: float, odd: str) -> RankStatus:
        prefill, per = number < self.ranks // 2, 8 if self.ranks >= 100 else 1
        place = number if prefill else number - self.ranks // 2
        role = "prefill" if prefill else "decode"
        instance = f"{role}-{place // per}"
        last, elapsed = number == self.ranks - 1, now + BEFORE_S
        step_s = (0.034 if prefill else 0.011) * self._wander[number]
        busy = 0.97 if self.situation == "busy" else 0.62
        wave = 1 + 0.15 * math.sin(now / 17 + number)
        running = int((52 if self.situation == "busy" else 21) * wave) if not prefill else int(3 * wave)
        waiting = (3 if self.situation == "busy" else 0) if prefill else 0
        held = int(KV * (0.83 if self.situation == "busy" else 0.47) * wave / 1.15)
        fields: dict[str, Any] = {}
        if odd == "slow" and last:
            step_s *= 4
        if (odd == "full" and last) or (odd == "queue" and not prefill):
            held, waiting, running = int(0.985 * KV), 9 if last else 2, min(SLOTS, int(running * 2.4))
        if odd == "dead" and number == 0:
            fields = {"state": "lost", "state_age_s": now + SINCE_S, "report_age_s": now + SINCE_S + 4}
        steps = elapsed * busy / step_s
        self._ended[number] = int(9 * elapsed)
        kinds = {"kv_pinned": int(0.12 * held) if prefill else 0, "kv_cached": int(0.3 * (KV - held))}
        if self.situation == "old":
            kinds = {}
        load = {
            "seq": int(elapsed * 10), "step": int(steps), "running": running, "waiting": waiting,
            "waiting_tokens": 700 * waiting, "kv_tokens": held, "kv_capacity": KV, "max_running": SLOTS,
            "busy_us_total": int(1e6 * steps * step_s), "output_tokens_total": 0 if prefill else int(1800 * elapsed),
            "prompt_tokens_total": int(9000 * elapsed) if prefill else 0,
            "admitted_tokens_total": int(9000 * elapsed) if prefill else 0,
            "cached_tokens_total": int(4100 * elapsed) if prefill else 0,
            "computed_tokens_total": int(4900 * elapsed) if prefill else 0,
            "kv_sent_bytes_total": int(3e8 * elapsed) if prefill else 0,
            "kv_received_bytes_total": 0 if prefill else int(3e8 * elapsed),
            "fetches_total": 0 if prefill else int(9 * elapsed), "fetch_us_total": 0 if prefill else int(9e4 * elapsed),
            **kinds,
        }  # fmt: skip
        slow = 4 if odd in ("slow", "queue") and (last or odd == "queue") else 1
        self._ttft[number].observe(0.12 * slow * self._rng.lognormvariate(0, 0.4))
        self._tpot[number].observe(0.013 * slow * self._rng.lognormvariate(0, 0.2))
        hidden, hostile = self.situation == "hidden", self.situation == "hostile"
        endpoint = "" if hidden else f"tcp://10.0.0.{place // per}:5700"
        given: dict[str, Any] = {
            "role": role, "model": HOSTILE if hostile else "llama-8b", "report_age_s": 0.1, "state_age_s": elapsed,
            "endpoint": f"tcp://{HOSTILE}:1" if hostile else endpoint, "load": load, "ended_total": self._ended[number],
            "estimate_requests": running + waiting + 1, "estimate_tokens": 400 * running, "outstanding": running,
            "ttft_counts": trimmed(self._ttft[number].buckets), "tpot_counts": trimmed(self._tpot[number].buckets),
        }  # fmt: skip
        made = rank(instance, place % per, **given | fields)
        return RankStatus(**{n: getattr(made, n) for n in made.__struct_fields__} | {"load": None}) if hidden else made


def story(situation: str, why_not: str) -> tuple[PartTrace, ...]:
    """The parts of a request that failed once and then did well."""
    start = 1_790_000_000_000_000

    def mark(at_ms: float, what: str, leg: Role | None = None, detail: str = "", attempt: int = 2) -> TraceEvent:
        return TraceEvent(start + round(1000 * at_ms), what, attempt, leg, detail)

    failed = f"prefill-0/0: peer_lost: {why_not if situation == 'hostile' else 'its lease has ended'}"
    reasons = (
        mark(2.0, "weighed", "prefill", "cache_aware, in tokens at 4 candidates: prefill-1/0 640 (512 cached), "
             "prefill-2/0 1,152, prefill-3/0 1,290"),
        mark(8.0, "acknowledged", "prefill", "by its next report 0 tokens besides this request"),
        mark(2.0, "weighed", "decode", "total_requests, in requests at 4 candidates: decode-0/0 3, decode-1/0 4"),
    )  # fmt: skip
    return (
        PartTrace("client", (mark(-0.6, "asked", attempt=0),), 0, -1),
        PartTrace("controller-0", (
            mark(0, "received", detail="1,152 tokens", attempt=1), mark(0.1, "dispatched", "prefill", "prefill-0/0", 1),
            mark(0.1, "dispatched", "decode", "decode-0/0", 1), mark(1.9, "retried", "prefill", failed, 1),
            mark(2, "dispatched", "prefill", "prefill-1/0"), mark(2.1, "dispatched", "decode", "decode-0/0"),
            mark(53, "output_reported"), mark(1310, "done"), *(() if situation == "old" else reasons),
        )),
        PartTrace("prefill-1/0", (
            mark(2.6, "taken", "prefill"), mark(3.1, "began", "prefill", "512 tokens cached"),
            mark(48, "held", "prefill"), mark(55, "ended", "prefill", "KV cache fetched"),
        ), 300, 400),
        PartTrace("decode-0/0", (
            mark(2.7, "taken", "decode"), mark(4, "attached", "decode"), mark(48.4, "handed", "decode"),
            mark(48.6, "began", "decode"), mark(52, "first_token", "decode"), mark(54, "fetched", "decode"),
            mark(1309, "ended", "decode", "length, 100 tokens"),
        ), -200, 900),
    )  # fmt: skip


def filled(situation: str, ranks: int, before_s: int = BEFORE_S) -> tuple[ScriptedSource, Frames]:
    """Its source, and frames that have seen the seconds before."""
    source, frames = ScriptedSource(situation, ranks), Frames(ttft_slo_s=0.5, tpot_slo_s=0.05)
    for second in range(-before_s, 0):
        frames.add(source.at(float(second)))
    return source, frames


def main(situation: str, ranks: str, port: str = "0") -> None:
    """Serve the page until SIGTERM; the URL is the first line."""
    source, frames = filled(situation, int(ranks), BEFORE_S if int(ranks) < 100 else 90)

    def feed(publish: Callable[[bytes], None], failed: Callable[[Exception], None]) -> Feed:
        return Feed(lambda: nullcontext(source), frames, publish, failed)  # type: ignore[arg-type]

    serve(port, feed, lambda url: print(url, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
