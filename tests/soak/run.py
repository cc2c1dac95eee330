"""One soak, from start to verdict: load, chaos, attackers, ledger, usage. Owns their order and the report's shape."""

from __future__ import annotations

import os
import queue
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bus.errors import ConfigError
from bus.wire.messages import Legs, Status, StatusQuery
from controller.trips import TRIPS, Trip
from nodes.own.engines.reference import generate_alone
from pdbus.client.channel import Channel
from pdbus.client.options import Options, controllers_of, make_request, patience
from pdbus.client.output import Result
from pdbus.client.traffic import Update
from pdbus.launcher import Cluster, ClusterSpec
from soak.attackers import Attackers, make_keys, ports_of
from soak.attacks import Ports
from soak.chaos import Chaos
from soak.ledger import Ledger
from soak.usage import Usage, usage_of

PROGRESS_S = 5.0
WARM_UP_S = 10.0
GRACE_S = 60.0  # for the requests that live when the faults end
RETRIES = 12
POOL = 64  # prompts whose answer is known
TURNS = 5  # of a conversation
GOES_ON = 0.8  # of the requests continue a conversation, where one waits for that
BLOCK_TOKENS = 16  # as nodes have them
ANY_TRIP = f"{Path(__file__).with_name('trips.py')}:AnyTrip"
RSS_MAX_BYTES = 1 << 30  # of one part, whatever the attackers do: docs/failures.md says what each attack may take


@dataclass(frozen=True, slots=True)
class SoakConfig:
    """`concurrency` requests are live at any time; a fault comes about every `kill_every_s`. `attackers`: one attack
    after the other goes on meanwhile; with `keys`, every part and attacker has a key of its own. `conversations`:
    requests are turns of them, TURNS each, and decode ranks keep KV caches: pairs make every trip. It takes `minutes`,
    and goes on until `at_least` requests have completed."""

    minutes: float = 10.0
    at_least: int = 0
    engine: str = "sim"
    model: str = ""
    kill_every_s: float = 3.0
    seed: int = 0
    prefill: int = 2
    decode: int = 2
    unified: int = 2
    concurrency: int = 32
    max_tokens: int = 64
    prompt_tokens: int = 256
    attackers: bool = False
    keys: bool = False
    conversations: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.minutes <= 100_000:
            raise ConfigError(f"--minutes must be above 0, not {self.minutes:g}")
        if self.kill_every_s <= 0:
            raise ConfigError(f"--kill-every-s must be above 0, not {self.kill_every_s:g}")
        if self.concurrency < 1 or self.max_tokens < 1 or self.prompt_tokens < 1:
            raise ConfigError("--concurrency, --max-tokens and --prompt-tokens must be at least 1")

    @property
    def model_name(self) -> str:
        return self.model or ("sim" if self.engine == "sim" else "tiny")

    def cluster(self) -> ClusterSpec:
        timing = ("--sim-base-s", "0.003", "--sim-prefill-s-per-token", "0.0001", "--sim-decode-s", "0.00005")
        cache = ("--kv-tokens", "16384")  # full within seconds: from then on memory grows only where something leaks
        node_args = ("--drain-s", "20", *cache, *(timing if self.engine == "sim" else ()))
        return ClusterSpec(
            prefill=self.prefill,
            decode=self.decode,
            unified=self.unified,
            prefill_method="cache_aware" if self.conversations else "total_tokens",
            decode_method=ANY_TRIP if self.conversations else "total_requests",
            decode_args=("--decode-cache",) if self.conversations else (),
            engine=self.engine,
            model=self.model_name,
            log_level="warning",
            node_args=node_args,
        )

    def legs(self) -> tuple[Legs, ...]:
        pairs: tuple[Legs, ...] = ("pair",) * 3 if self.prefill and self.decode else ()
        return (*pairs, "unified") if self.unified else pairs


@dataclass(slots=True)
class Verdict:
    """What the soak found. `as_json` has the fields that the command prints on its last line."""

    config: SoakConfig
    ledger: Ledger
    faults: Counter[str]
    troubles: list[str]
    lost: list[str]
    start: Usage
    end: Usage
    seconds: float
    client_start: Usage = field(default=Usage())
    client_end: Usage = field(default=Usage())
    attacks: Counter[str] = field(default_factory=Counter)
    rss_max_bytes: int = 0  # of one part, while there were attackers
    trips: dict[Trip, int] = field(default_factory=dict)  # of pairs, since the controller's last start
    at_decode: int = 0  # turns of conversations that one rank ran, since the start

    @property
    def clean(self) -> bool:
        found = self.ledger.duplicated or self.ledger.wrong or self.lost or self.troubles
        return not found and self.rss_max_bytes <= RSS_MAX_BYTES

    def as_json(self) -> dict[str, Any]:
        ledger = self.ledger
        return {
            "accepted": ledger.accepted,
            "completed": ledger.completed,
            "failed": dict(sorted(ledger.failed.items())),
            "duplicated": ledger.duplicated,
            "lost": len(self.lost),
            "wrong": ledger.wrong,
            "kills": sum(self.faults.values()),
            "attacks": sum(self.attacks.values()),
            "rss_max_bytes": self.rss_max_bytes,
            "rss_start_bytes": self.start.rss_bytes,
            "rss_end_bytes": self.end.rss_bytes,
            "fds_start": self.start.fds,
            "fds_end": self.end.fds,
            "resumed": ledger.resumed,
            "troubles": len(self.troubles),
            "client_rss_start_bytes": self.client_start.rss_bytes,
            "client_rss_end_bytes": self.client_end.rss_bytes,
            "keys": self.config.keys,
            "trips": self.trips,
            "at_decode": self.at_decode,
            "engine": self.config.engine,
            "seed": self.config.seed,
            "seconds": round(self.seconds, 1),
        }


def run(config: SoakConfig, say: Callable[[str], None]) -> Verdict:
    """Raises StartError when the cluster does not come up. `say` gets lines of progress."""
    rng = random.Random(config.seed)
    prompts = _Prompts(config, rng)
    with ExitStack() as exits:
        keys = attackers = ""
        if config.keys:
            keys, attackers = make_keys(Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="pdbus-"))))
        cluster = exits.enter_context(Cluster(replace(config.cluster(), keys=keys)))
        at = controllers_of(cluster.controller, None, None)
        channel = Channel(at.endpoints, patience(RETRIES, 20.0), keys=keys, seed=config.seed)
        exits.callback(channel.stop)
        return _Soak(config, cluster, channel, prompts, rng, say, attackers).run()


class _Prompts:
    """Prompts with their answers. Those of torch are computed once, before; those of sim are cheap and always new."""

    def __init__(self, config: SoakConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._pool: list[tuple[list[int], list[int]]] = []
        if config.engine != "sim":
            self._pool = [self._make() for _ in range(POOL)]

    def draw(self) -> tuple[list[int], list[int]]:
        """A prompt, and its output of a random length."""
        prompt, output = self._rng.choice(self._pool) if self._pool else self._make()
        return prompt, output[: self._rng.randint(1, len(output))]

    def next_turn(self, before: list[int]) -> tuple[list[int], list[int]]:
        """The prompt that follows `before`, and its output of a random length."""
        prompt, output = self._make(before)
        return prompt, output[: self._rng.randint(1, len(output))]

    def _make(self, before: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        config, rng = self._config, self._rng
        prompt = [*before, *(rng.randrange(3, 512) for _ in range(rng.randint(1, config.prompt_tokens)))]
        return prompt, generate_alone(config.model_name, prompt, config.max_tokens, engine=config.engine)


class _Soak:
    def __init__(
        self, config: SoakConfig, cluster: Cluster, channel: Channel, prompts: _Prompts, rng: random.Random,
        say: Callable[[str], None], keys: str,
    ) -> None:  # fmt: skip
        """`keys`: where the attackers' are."""
        self._config = config
        self._keys = keys
        self._cluster = cluster
        self._channel = channel
        self._prompts = prompts
        self._rng = rng
        self._say = say
        self._ledger = Ledger()
        self._updates: queue.SimpleQueue[tuple[str, Update]] = queue.SimpleQueue()
        self._turns: dict[str, tuple[int, list[int]]] = {}  # of the requests that live: which turn, and all its tokens
        self._at_decode = 0  # turns without a prefill rank
        self._waiting: list[tuple[int, list[int]]] = []  # conversations whose last turn is over
        self._where = controllers_of(cluster.controller, None, None)
        self._said_at = self._began = time.monotonic()
        self._chaos = Chaos(cluster, random.Random(config.seed + 1), every_s=config.kill_every_s, say=say)
        self._attackers = Attackers(cluster, random.Random(config.seed + 2), self._ports, say)

    def run(self) -> Verdict:
        config = self._config
        length_s = 60 * config.minutes
        self._serve(min(WARM_UP_S, 0.2 * length_s), refill=True)
        start, client_start = self._usage()
        with ExitStack() as breaking:
            for one in (self._chaos, self._attackers) if config.attackers else (self._chaos,):
                one.start()
                breaking.callback(one.stop)
            self._serve(length_s - (time.monotonic() - self._began), refill=True)
            while self._ledger.completed < config.at_least:
                self._serve(1.0, refill=True)
        self._serve(GRACE_S, refill=False)
        self._serve(1.0, refill=False, to_the_end=True)  # what comes twice would come now
        counts = self._channel.ask(self._where.decode, StatusQuery, Status, 5.0).result().counts
        trips = {trip: count for trip in TRIPS if (count := counts.get(f"trip_{trip}"))}
        lost = self._ledger.overdue(float("inf"), 0.0)
        end, client_end = self._usage()
        return Verdict(
            config, self._ledger, self._chaos.faults, self._chaos.troubles + self._attackers.troubles, lost, start, end,
            time.monotonic() - self._began, client_start, client_end, self._attackers.attacks,
            self._attackers.rss_max_bytes, trips, self._at_decode,
        )  # fmt: skip

    def _serve(self, seconds: float, *, refill: bool, to_the_end: bool = False) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0 and (refill or to_the_end or self._ledger.live):
            while refill and self._ledger.live < self._config.concurrency:
                self._begin()
            try:
                rid, update = self._updates.get(timeout=min(0.25, left_s))
            except queue.Empty:
                pass
            else:
                if self._ledger.deliver(rid, update) and rid in self._turns:
                    assert isinstance(update, Result)
                    self._at_decode += update.prefill is None and update.code == "ok"
                    turn, tokens = self._turns.pop(rid)
                    self._waiting += [(turn + 1, tokens)] if turn < TURNS else []
            if time.monotonic() - self._said_at >= PROGRESS_S:
                self._said_at = time.monotonic()
                self._progress()

    def _begin(self) -> None:
        turn = 1
        if self._waiting and self._rng.random() < GOES_ON:
            turn, before = self._waiting.pop(self._rng.randrange(len(self._waiting)))
            prompt, expected = self._prompts.next_turn(before)
        else:
            prompt, expected = self._prompts.draw()
        options = Options(leg=self._rng.choice(self._config.legs()), max_tokens=len(expected))
        if self._rng.random() < 0.02:
            options["deadline_s"] = self._rng.choice((0.05, 0.3))
        rid = self._ledger.begin(expected, time.monotonic())
        options["rid"] = rid
        if self._config.conversations:
            self._turns[rid] = turn, [*prompt, *expected]
            options["ignore_eos"] = True
            options["block_tokens"] = BLOCK_TOKENS
        request = make_request(prompt, options, self._where, self._channel.rng)
        self._channel.begin(request, lambda update: self._updates.put((rid, update)))
        if self._rng.random() < 0.02:
            self._channel.cancel(rid)

    def _ports(self) -> Ports:
        status = self._channel.ask(self._where.decode, StatusQuery, Status, 5.0).result()
        return ports_of(self._cluster, status.ranks, self._keys)

    def _usage(self) -> tuple[Usage, Usage]:
        """Of the cluster's processes, and of this one."""
        return usage_of(child.pid for child in self._cluster.children.values()), usage_of([os.getpid()])

    def _progress(self) -> None:
        ledger = self._ledger
        failed = ", ".join(f"{code} {count}" for code, count in sorted(ledger.failed.items())) or "none"
        late = ledger.overdue(time.monotonic(), 30.0)
        self._say(
            f"{time.monotonic() - self._began:6.0f} s: accepted {ledger.accepted}, completed {ledger.completed} "
            f"(resumed {ledger.resumed}), failed: {failed}; live {ledger.live}, over 30 s old {len(late)}; "
            f"faults {self._chaos.kills}, duplicated {ledger.duplicated}, wrong {ledger.wrong}"
        )
